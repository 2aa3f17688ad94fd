"""The data-parallel engine: its parts, and real workers beside one process that has all minibatches of an update."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_runs import SLEEP_S, Case, assert_equal_to_one_process, on_shared_devices, reference
from extents import slow_but_for
from feature_workers import trained
from launching import curve
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset
from toy_workers import stage_contents, write_plan

from pipeplan_launch import Data, Job, load_job
from pipeplan_launch.data_parallel.module_program import ModuleProgram, refuse_written_parameters, takes_any_size
from pipeplan_launch.data_parallel.wrapping import (
    Replicated,
    Sharded,
    recomputation_explained,
    recompute_blocks,
    refuse_indivisible,
    repeated_blocks,
    return_own_memory,
)
from pipeplan_launch.elastic import restart_state
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.pass_conditions import mix_seed
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import GradientAveraging, check_averaging_options, parse_compression
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.runtime.stage_setup import RunOptions
from pipeplan_launch.tracing.trace import trace_job


def loaded(folder: Path, replicas: list[int], schedule: str = "1f1b-flush", **fields: Any) -> LaunchPlan:
    contents = stage_contents(replicas, schedule=schedule, accumulate=2 if schedule == "1f1b-flush" else None)
    return load_plan(write_plan(folder, [content | fields for content in contents]))


def test_a_stage_file_says_how_a_plan_is_data_parallel(tmp_path: Path) -> None:
    assert loaded(tmp_path, [2]).data_parallel == ""
    found = loaded(tmp_path, [2], data_parallel="zero1", device_names=["a", "b"])
    assert (found.data_parallel, found.shard_optimizer, found.device_names) == ("zero1", True, ("a", "b"))
    shared = load_plan(Case("plain", "ddp", 2, 8, shares=(5, 3)).write(tmp_path / "shares"))
    assert shared.pipeline[0].shares == (5, 3)
    apart: dict[str, Any] = {"servers": 2, "workers_per_server": 2, "server_sizes": [2, 1]}
    for replicas, schedule, fields, says in (
        ([2], "1f1b-stashing", {"data_parallel": "fsdp"}, "this one has 1 stages under 1f1b-stashing"),
        ([2], "1f1b-flush", {"data_parallel": "ddp2"}, "data_parallel"),
        ([3], "1f1b-flush", apart | {"data_parallel": "hsdp"}, "needs as many workers on every server"),
        ([2], "1f1b-flush", {"device_names": ["a"]}, "device_names: expected 2, found 1"),
    ):
        with pytest.raises(LaunchError, match=says):
            loaded(tmp_path / "bad", replicas, schedule, **fields)
    for case, says in (
        (Case("plain", "ddp", 2, 8, shares=(5, 4)), "2 replicas cannot share 8 minibatches as 5, 4"),
        (Case("plain", "ddp", 2, 8, shares=(8,)), "cannot share"),
        (Case("plain", "zero1", 2, 8, shares=(5, 3)), "need data_parallel 'ddp'"),
        (Case("plain", "", 2, 8, shares=(5, 3)), "need data_parallel 'ddp'"),
    ):
        with pytest.raises(LaunchError, match=says):
            load_plan(case.write(tmp_path / "bad"))


def test_who_runs_a_plan(tmp_path: Path) -> None:
    pipeline, ddp, fsdp = (loaded(tmp_path / f"plan{one}", [2], data_parallel=one) for one in ("", "ddp", "fsdp"))
    plain = RunOptions(tmp_path)
    compressed = RunOptions(tmp_path, averaging=GradientAveraging(parse_compression("bf16")))
    assert [plain.runs_own_module(one) for one in (pipeline, ddp, fsdp)] == [False, True, True]
    assert [compressed.runs_own_module(one) for one in (pipeline, ddp)] == [False, True]
    thin = RunOptions(tmp_path, averaging=GradientAveraging(parse_compression("powersgd")))
    assert not thin.runs_own_module(ddp)
    assert not RunOptions(tmp_path, compile_backend="eager").runs_own_module(ddp)
    for averaging in (compressed.averaging, GradientAveraging(shards_optimizer=True)):
        check_averaging_options(averaging, ddp)
        with pytest.raises(LaunchError, match="each holds a part: leave it out"):
            check_averaging_options(averaging, fsdp)
    with pytest.raises(LaunchError, match="--compile is for workers"):
        check_averaging_options(GradientAveraging(), fsdp, "eager")


class Model(nn.Module):
    """Two lists of blocks, the larger of which has a block that shares its weight with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.mixed = nn.Sequential(nn.Linear(4, 90), nn.ReLU(), nn.LayerNorm(90))
        self.large = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3)]
        )
        self.head = nn.Linear(4, 4)
        self.head.weight = self.large[1][0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.large:
            x = x + block(x)
        result: Tensor = self.head(self.mixed(self.small(x))[:, :4])
        return result


def test_the_repeated_blocks_of_a_model() -> None:
    model = Model()
    assert repeated_blocks(model) == [model.large[0], model.large[2]]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    mixed = nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2))
    assert repeated_blocks(mixed) == [mixed[1], mixed[3]]


def test_recomputing_changes_neither_gradients_nor_statistics() -> None:
    plain = Model()
    again = copy.deepcopy(plain)
    recompute_blocks(again)
    held = []
    for model in (plain, again):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, to=saved: to.append(one) or one, lambda one: one):
            torch.manual_seed(1)
            model(torch.ones(5, 4)).square().sum().backward()
        held.append(len(saved))
    assert all(torch.equal(*pair) for pair in zip(plain.buffers(), again.buffers(), strict=True))
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert plain.large[0][1].num_batches_tracked == 1
    assert held[1] < held[0]


class Caching(nn.Module):
    """A block whose second forward pass takes a short cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cache = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.tanh(self.inner(x)).square()
        return self.cache


def test_a_block_that_does_not_repeat_its_work_is_named() -> None:
    model = nn.Sequential(Caching(), Caching())
    recompute_blocks(model)
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(LaunchError, match="does other work when its forward pass runs"), recomputation_explained():
        loss.backward()


def test_a_block_returns_no_view() -> None:
    block = nn.Unflatten(1, (2, 2))
    given = torch.ones(3, 4, requires_grad=True)
    return_own_memory(block)
    assert not block(given)._is_view()
    block(given).sum().backward()
    assert torch.equal(given.grad, torch.ones(3, 4))


def job(model: nn.Module, samples: int = 9, **more: Any) -> Job:
    data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 4))
    return Job(model, data=lambda: Data(data, data), loss=nn.functional.mse_loss, minibatch=4, **more)


class Calls(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def branching() -> nn.Module:
    return Calls(lambda x: x if float(x.sum()) > 0 else -x)


def test_whether_a_model_takes_a_short_minibatch() -> None:
    fixed = Calls(lambda x: x.view(4, 2, 2).flatten(1))
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    cases = [(nn.Linear(4, 4), 9, True), (fixed, 9, False), (fixed, 8, True), (branching(), 9, True)]
    for model, samples, any_size in (*cases, (normed, 9, False), (normed, 10, True)):
        before = copy.deepcopy(model.state_dict())
        assert takes_any_size(job(model, samples), 4) == any_size
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Changing(nn.Module):
    """Writes its weight in forward(), and keeps its last input."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.inner, self.norm, self.write = nn.Linear(4, 4), nn.BatchNorm1d(4), write

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        self.write(self.inner.weight)
        result: Tensor = self.norm(self.inner(x))
        return result


def test_fsdp_refuses_a_forward_pass_that_writes_parameters() -> None:
    """Through .data, in place, by assignment, and in a list."""
    for write in (
        lambda weight: weight.data.clamp_(-0.1, 0.1),
        lambda weight: weight.detach().add_(1),
        lambda weight: setattr(weight, "data", weight.data * 2),
        lambda weight: torch._foreach_mul_([weight.detach()], 2),
    ):
        model = Changing(write)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(LaunchError, match=r"^forward\(\) changes the parameter 'inner.weight', and under FSDP"):
            refuse_written_parameters(job(model), 4)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not hasattr(model, "last")
    refuse_written_parameters(job(Model()), 4)
    refuse_written_parameters(job(Changing(lambda weight: weight.abs())), 4)
    with pytest.raises(LaunchError, match="so it may use other weights on each worker"):
        refuse_written_parameters(job(branching()), 4)


def test_parameters_that_fsdp_cannot_divide() -> None:
    scalar, waves, hooked = nn.Module(), nn.Module(), nn.Linear(4, 4)
    scalar.odd, waves.odd = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    hooked.weight.register_hook(lambda gradient: gradient)
    for model, says in (
        (scalar, "'odd' has no dimensions, which FSDP cannot divide: give it one, as in torch.ones"),
        (waves, "'odd' is complex, which FSDP cannot divide"),
        (hooked, r"'weight' has a hook \(register_hook\)"),
    ):
        with pytest.raises(LaunchError, match=says):
            refuse_indivisible(ModuleProgram(job(model), torch.device("cpu")))


def test_ddp_leaves_little_to_reduce_after_the_backward_pass() -> None:
    """The bucket with the first parameters, which is full last, closes at 1 MiB."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 16384), nn.Linear(16384, 512))
        assert dist.group.WORLD is not None
        ddp = Replicated(model, dist.group.WORLD, rounds=False).module
        assert isinstance(ddp, nn.parallel.DistributedDataParallel)
        sizes = [int(size) for size in ddp._get_ddp_logging_data()["bucket_sizes"].split(", ")]
        assert len(sizes) > 1
        assert sizes[-1] == model[0].weight.nbytes
    finally:
        dist.destroy_process_group()


def test_fsdp_divides_the_gradients_of_every_minibatch() -> None:
    """Also of those that are not the last one of an update, in a group of one worker."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        program = ModuleProgram(job(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.device("cpu"))
        assert dist.group.WORLD is not None
        wrapper, inputs = Sharded(program, DeviceMesh.from_group(dist.group.WORLD, "cpu")), torch.ones(2, 4)
        sums = []
        for last in (False, True):
            with wrapper.exchanging(last):
                wrapper.module(lambda: program.model(inputs)).sum().backward()
            gradients = [one.grad for one in program.parameters_by_name().values()]
            assert all(isinstance(one, DTensor) for one in gradients)
            sums.append([one.full_tensor().sum().item() for one in gradients if isinstance(one, DTensor)])
        assert sums[1] == pytest.approx([2 * one for one in sums[0]])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "case",
    [
        Case("valid_targets", "zero1", 3, 4),
        Case("valid_targets", "fsdp", 2, 4, recompute=True),
        Case("normalised", "hsdp", 4, 8, servers=2),
        Case("hooked", "ddp", 2, 2),
        Case("normalised", "ddp", 3, 7, shares=(1, 4, 2)),
    ],
    ids=lambda case: f"{case.mode}-{case.replicas}-{case.job}{'-shares' * bool(case.shares)}",
)
def test_training_is_that_of_one_process(tmp_path: Path, case: Case) -> None:
    """13 minibatches an epoch: in the last update some replicas have none. 4 test minibatches, or 3 rounds of two."""
    assert_equal_to_one_process(case, case.train(tmp_path, "--epochs", "2"), 2)


@pytest.mark.parametrize(("mode", "shares"), [("fsdp", ()), ("ddp", (1, 3))])
def test_training_goes_on_as_if_no_worker_had_been_lost(tmp_path: Path, mode: str, shares: tuple[int, ...]) -> None:
    """Bit by bit: after a death before the first checkpoint, in the middle of an epoch, and in an evaluation."""
    case = Case("mortal", mode, 2, 4, shares=shares)
    options = ["--epochs", "2", "--checkpoint-minibatches", "8", "--log-every", "0"]
    whole = case.train(tmp_path / "whole", *options)
    folder, deaths = case.write(tmp_path / "broken"), ["1:2", "0:8", "1:5" if shares else "1:8", ""]
    (folder / "launcher").mkdir()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, dies in enumerate(deaths):
        variables = {
            restart_state.VARIABLE: str(folder / "launcher"),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "DIES": " ".join(deaths),
        }
        ended = case.start(folder, *options, store=store, name=f"attempt-{attempt}", **variables)
        lost = int(dies[0]) if dies else None
        assert ended.statuses == [0 if lost is None else 9 if rank == lost else 3 for rank in range(2)], ended.err
    assert curve(folder / "run") == curve(whole)
    expected, found = trained(whole), trained(folder / "run")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_fsdp_refuses_workers_that_share_a_gpu(tmp_path: Path) -> None:
    """Over Gloo, torch would end with SIGSEGV."""
    case = Case("adapted", "fsdp", 2, 4)
    ended = case.start(case.write(tmp_path / "plan"), "--epochs", "1", main=on_shared_devices)
    assert ended.statuses == [2, 2]
    assert "error: FSDP needs a GPU for every worker, and here some share one: " in ended.err


ENGINES = [("zero1", 2, 1), ("fsdp", 3, 1), ("", 1, 1), ("ddp", 2, 1)]


@pytest.mark.parametrize("modes", slow_but_for([ENGINES], [ENGINES, [("", 1, 1), ("hsdp", 4, 2), ("ddp", 2, 1)]]))
def test_a_checkpoint_belongs_to_no_engine(tmp_path: Path, modes: list[tuple[str, int, int]]) -> None:
    """Epochs under ZeRO-1, FSDP, the traced stage and DDP, each from the last checkpoint of the one before."""
    job = load_job(reference("all_used"), 0)
    traced = trace_job(job, job.minibatch)
    plan = {
        "layers": [layer.name for layer in traced.layers],
        "model": {"ref": reference("all_used"), "graph_hash": traced.graph_hash},
    }
    cases = [Case("all_used", mode, replicas, 4, servers) for mode, replicas, servers in modes]
    start: tuple[str, ...] = ()
    for epochs, case in enumerate(cases, 1):
        folder = tmp_path / (case.mode or "traced")
        run = case.train(folder, "--epochs", str(epochs), "--no-self-check", *start, **plan)
        start = "--resume-from", str(run)
    assert_equal_to_one_process(cases[-1], run, len(cases), but=("loss.mean",))  # a mean of as many as were replicas


def test_the_wait_for_the_exchange_is_no_part_of_the_backward_pass(tmp_path: Path) -> None:
    """A replica whose gradients are there early waits for the others' in the column of the exchange."""
    run = Case("unequal_speeds", "ddp", 2, 2).train(tmp_path, "--epochs", "1", "--no-self-check")
    steps = [json.loads(line) for path in sorted((run / "metrics").iterdir()) for line in path.open()]
    late = {rank: [step for step in steps if step["rank"] == rank] for rank in (0, 1)}
    slow, quick = (sum(step["backward_s"] for step in late[rank]) for rank in (1, 0))
    assert slow > SLEEP_S * len(late[1])
    assert quick < slow / 2
    assert sum(step["sync_s"] for step in late[0]) > slow / 2


def test_rounded_gradients_are_the_mean_of_what_workers_round(tmp_path: Path) -> None:
    run = Case("adapted", "ddp", 2, 2).train(tmp_path / "rounded", "--epochs", "1", "--compress", "bf16")
    job = load_job(reference("adapted"), 0)
    train, model = job.datasets.train, job.model.train()
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = job.make_optimizer(parameters)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(mix_seed("order", 0, 0)))
    for pair in zip(order.split(job.minibatch)[0::2], order.split(job.minibatch)[1::2], strict=True):
        means = [torch.zeros_like(one, dtype=torch.bfloat16) for one in parameters]
        for chosen in pair:
            inputs, target = train[chosen]
            gradients = torch.autograd.grad(job.loss(model(inputs), target), parameters)
            for mean, gradient in zip(means, gradients, strict=True):
                mean += gradient.bfloat16() / 2
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.to(parameter)
        optimizer.step()
    found = trained(run)
    for name, one in model.named_parameters():
        torch.testing.assert_close(found[name], one.detach(), rtol=1e-9, atol=1e-12)
