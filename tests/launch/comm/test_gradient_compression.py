"""Several processes that average their gradients, against one that averages literally."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy_training
from extents import slow_but_for
from replicas import RATE, WIDTH, Group, Minibatch, Model, groups, mean_gradients, run, step, train, train_literally
from torch import Tensor, nn
from toy_training import trained
from toy_workers import Toy, run_plan, stage_contents, write_plan

from pipeplan_launch.__main__ import options_from
from pipeplan_launch.comm import gradient_exchange
from pipeplan_launch.comm.buckets import UpdateGroup, as_real, make_buckets
from pipeplan_launch.comm.gaia_filter import SignificanceFilter, StepSizes
from pipeplan_launch.comm.gradient_allreduce import GradientReducer
from pipeplan_launch.comm.gradient_exchange import compressed_exchange
from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.errors import LaunchError, PeerLost
from pipeplan_launch.plan.run_options import Compression, GradientAveraging
from pipeplan_launch.plan.stage_files import load_plan

State = dict[str, Tensor]
ONE_EACH, ONE_BUCKET = 1, 2**20
"""Bytes of a bucket: every parameter has its own, or all of one type share one."""


def assert_close(ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float = 1e-5) -> None:
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            ours[name], value, rtol=rtol, atol=rtol / 10, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_agree(results: list[State]) -> None:
    """The replicas, to the last bit."""
    for other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())


def train_ways(rank: int, given: list[Group], ways: list[tuple[int, bool]], exchange: Any) -> list[State]:
    """`replicas.train` with each of the (bytes of a bucket, whether gradients leave early)."""
    return [train(rank, given, bytes_, early, exchange) for bytes_, early in ways]


def trained_ways(folder: Path, world: int, given: list[Group], ways: list[tuple[int, bool]], exchange: Any) -> Any:
    """The state after training in each of the ways, in which all replicas agree."""
    for results in zip(*run(world, train_ways, folder, given, ways, exchange), strict=True):
        assert_agree(list(results))
        yield results[0]


@pytest.mark.parametrize(("world", "each"), [(2, 1), (3, 2)])
def test_the_mean_is_that_of_one_process(tmp_path: Path, world: int, each: int) -> None:
    given = groups(world, 6, each=each)
    ways = list(itertools.product((ONE_EACH, ONE_BUCKET), (True, False)))
    for found in trained_ways(tmp_path, world, given, ways, None):
        assert_close(found, train_literally(given))
        assert torch.equal(found["unused"], torch.ones(2)), "a parameter without a gradient is left alone"


def watch(rank: int, given: list[Group]) -> list[str]:
    """What happens in a backward pass with a bucket for every parameter."""
    events: list[str] = []
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(f"made {name}"))
    really = dist.all_reduce

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        if tensor.dtype == torch.float32:
            events.append("sent")
        return really(tensor, **options)

    dist.all_reduce = all_reduce
    reducer = GradientReducer(parameters, dist.group.WORLD, bucket_bytes=ONE_EACH)  # type: ignore[arg-type]
    for number, _ in enumerate(given):
        with reducer.backward(parameters, 1.0, UpdateGroup(2.0, number)):
            model(torch.ones(2, 4)).sum().backward()
        reducer.start(UpdateGroup(2.0, number))
        reducer.finish()
        events.append("updated")
    return events


def test_buckets_leave_while_backward_goes_on(tmp_path: Path) -> None:
    one = ["made 2.weight", "sent", "made 1.weight", "sent", "made 0.weight", "sent", "updated"]
    assert run(2, watch, tmp_path, [[], []])[1] == one * 2


def cut_short(rank: int) -> State:
    """The group was to have three minibatches on two replicas; the segment ended after two, one on each."""
    parameter = nn.Parameter(torch.zeros(3))
    reducer = GradientReducer({"w": parameter}, dist.group.WORLD)  # type: ignore[arg-type]
    with reducer.backward({"w": parameter}, 1.0, UpdateGroup(3.0)):
        (parameter * float(rank + 1)).sum().backward()
    reducer.start(UpdateGroup(3.0))
    return reducer.finish()


def test_a_group_that_the_end_of_the_segment_cut_short(tmp_path: Path) -> None:
    for result in run(2, cut_short, tmp_path):
        torch.testing.assert_close(result["w"], torch.full((3,), 1.5))


class Again(torch.autograd.Function):
    """A backward that runs backward on the same parameter itself, before it is done."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.leaf.sum().backward()
        return gradient.expand(3), None


def twice(rank: int) -> list[str]:
    return [_twice(ONE_BUCKET), _twice(ONE_EACH)]


def _twice(bytes_: int) -> str:
    weights = {"first": nn.Parameter(torch.zeros(3)), "w": nn.Parameter(torch.zeros(3))}
    reducer = GradientReducer(weights, dist.group.WORLD, bucket_bytes=bytes_)  # type: ignore[arg-type]
    try:
        with reducer.backward(weights, 1.0, UpdateGroup(2.0)):
            later = weights["first"].sum()  # its backward comes after that of what is computed after it
            (later + Again.apply(weights["w"], weights["w"])).backward()  # type: ignore[no-untyped-call]
        reducer.start(UpdateGroup(2.0))
        return str(reducer.finish()["w"].tolist())
    except LaunchError as error:
        return str(error)


def test_a_second_gradient_is_added_or_refused_but_not_lost(tmp_path: Path) -> None:
    for added, refused in run(2, twice, tmp_path):
        assert added == "[2.0, 2.0, 2.0]"
        assert "made the gradient of 'w' again" in refused


def test_types_do_not_share_a_bucket_and_buckets_come_in_the_order_of_backward() -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
    parameters = {f"p{i}": nn.Parameter(torch.zeros(2, dtype=kind)) for i, kind in enumerate(kinds)}
    made = make_buckets(parameters)
    assert [list(bucket.views) for bucket in made] == [["p3", "p1"], ["p4", "p2", "p0"]]
    assert [(bucket.index, bucket.is_last) for bucket in made] == [(0, False), (1, True)]


def bf16(group: dist.ProcessGroup, _parameters: object) -> Any:
    return compressed_exchange(group, Compression("bf16"))


def test_bf16_sums_in_bfloat16(tmp_path: Path) -> None:
    given = groups(2, 3)[:2]  # without the short group
    model = Model()
    parameters = dict(model.named_parameters())
    for update in given:
        each = [mean_gradients(model, replica) for replica in update]
        names = each[0].keys() | each[1].keys()
        halves = {name: [(as_real(one[name]).bfloat16() / 2) for one in each if name in one] for name in names}
        step(parameters, {name: like(parameters[name], sum(given[1:], given[0])) for name, given in halves.items()})
    for found in trained_ways(tmp_path, 2, given, [(ONE_EACH, True), (ONE_BUCKET, True)], bf16):
        assert_close(found, {name: one.detach() for name, one in parameters.items()})


def like(parameter: Tensor, numbers: Tensor) -> Tensor:
    """Real numbers as a gradient of the parameter's type."""
    made = numbers.to(as_real(parameter.detach()).dtype)
    return torch.view_as_complex(made) if parameter.is_complex() else made


def by_powersgd(rank: int, given: list[Group]) -> list[State]:
    """The weights by torch's own DDP with its hook, and by the reducer."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    group: Any = dist.group.WORLD
    theirs, ours = plain_model(), plain_model()
    parallel = DistributedDataParallel(theirs)
    settings = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "orthogonalization_epsilon": 1e-8}
    parallel.register_comm_hook(PowerSGDState(group, **settings, random_seed=2), powerSGD_hook)
    parameters = dict(ours.named_parameters())
    reducer = GradientReducer(parameters, group, compressed_exchange(group, Compression("powersgd", rank=2, exact=2)))
    for number, update in enumerate(given):
        ((inputs, _, _),) = update[rank]
        theirs.zero_grad()
        parallel(inputs).square().mean().backward()
        step(dict(theirs.named_parameters()), {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
        with reducer.backward(parameters, 1.0, UpdateGroup(2.0, number)):
            ours(inputs).square().mean().backward()
        reducer.start(UpdateGroup(2.0, number))
        step(parameters, reducer.finish())
    return [{name: one.detach() for name, one in model.named_parameters()} for model in (theirs, ours)]


def plain_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 7))


def test_powersgd_is_that_of_ddp(tmp_path: Path) -> None:
    """Two exact updates, then four with error feedback and a warm start."""
    (wanted, ours), (_, others) = run(2, by_powersgd, tmp_path, groups(2, 7)[:6])
    assert_agree([ours, others])
    assert_close(ours, wanted)


def delivered(rank: int, given: Tensor) -> list[Tensor]:
    """The mean gradient as each update delivers it; `given` has a matrix for each update and replica."""
    group: Any = dist.group.WORLD
    exchange = compressed_exchange(group, Compression("powersgd", rank=1, exact=0))
    reducer = GradientReducer({"w": nn.Parameter(torch.zeros(WIDTH, WIDTH))}, group, exchange)
    means = []
    for number, update in enumerate(given):
        reducer.add({"w": update[rank]})
        reducer.start(UpdateGroup(2.0, number, ends_segment=number == len(given) - 1))
        means.append(reducer.finish()["w"].clone())
    return means


def test_what_powersgd_holds_back_travels_with_the_last_update_of_a_segment(tmp_path: Path) -> None:
    given = torch.randn(5, 2, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    ours, theirs = run(2, delivered, tmp_path, given)
    assert all(map(torch.equal, ours, theirs))
    torch.testing.assert_close(sum(ours), given.mean(1).sum(0), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(sum(ours[:-1]), given[:-1].mean(1).sum(0), rtol=1e-2), "something was held back"


def filtered_literally(given: list[Group], servers: list[list[int]], share: float, rate: float) -> State:
    """Gaia's rule with what is not significant held back at its server."""
    model = Model()
    parameters = dict(model.named_parameters())
    held: list[State] = [{n: torch.zeros_like(as_real(p.detach())) for n, p in parameters.items()} for _ in servers]
    for number, update in enumerate(given):
        everything = [one for replica in update for one in replica]
        total = sum(part for _, part, _ in everything)
        delivered: State = {}
        for server, residual in zip(servers, held, strict=True):
            mine: list[Minibatch] = [one for rank in server for one in update[rank]]
            weight = sum(part for _, part, _ in mine) / total
            gradients = mean_gradients(model, mine)
            for name, parameter in parameters.items():
                if name in gradients:
                    residual[name] = residual[name] + as_real(gradients[name]) * weight
                threshold = share / (number + 1) ** 0.5 * as_real(parameter.detach()).abs()
                significant = rate * residual[name].abs() > threshold
                if number == len(given) - 1:
                    significant = torch.ones_like(significant)
                sent = torch.where(significant, residual[name], 0.0)
                residual[name] = residual[name] - sent
                delivered[name] = delivered.get(name, 0.0) + sent
        used = set(mean_gradients(model, everything))
        step(parameters, {name: like(parameters[name], delivered[name]) for name in used})
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("bytes_", [ONE_EACH, ONE_BUCKET])
def test_the_filter_follows_its_rule(tmp_path: Path, bytes_: int) -> None:
    """Processes of their own for each: torch numbers the groups of a server, of which replicas make unequally many."""
    given = groups(3, 6)
    (found,) = trained_ways(tmp_path, 3, given, [(bytes_, True)], make_sparse_filter)
    assert_close(found, filtered_literally(given, [[0, 1], [2]], 0.1, RATE))


def make_sparse_filter(group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> Any:
    """Never all of a bucket, however small it is: the rule is then that of single entries."""
    from pipeplan_launch.comm import gaia_filter

    gaia_filter._INDEX_BYTES = -100
    return SignificanceFilter([[0, 1], [2]], group, 0.1, lambda _: RATE)


def bytes_between(rank: int) -> list[tuple[list[int], int]]:
    """For a high share and a low one: elements that a speaker hands to Gloo, and how many entries it holds back."""
    sent: list[int] = []
    for name in ("all_reduce", "broadcast"):
        really = getattr(dist, name)

        def counted(tensor: Tensor, *given: Any, really: Any = really, **options: Any) -> Any:
            sent.append(tensor.numel())
            return really(tensor, *given, **options)

        setattr(dist, name, counted)
    found = []
    for share in (0.99, 0.2):
        (bucket,) = make_buckets({"w": nn.Parameter(torch.ones(1000))})
        exchange = SignificanceFilter([[0], [1]], dist.group.WORLD, share, lambda _: 1.0)
        bucket.values.copy_(torch.arange(1000.0) / 1000)
        sent.clear()
        exchange(bucket, UpdateGroup())
        found.append((list(sent), sum(int((one != 0).sum()) for one in exchange._held.values())))
    return found


def test_few_entries_travel_alone_and_many_all_together(tmp_path: Path) -> None:
    few, many = run(2, bytes_between, tmp_path)[0]
    assert few == ([9, 9, 9, 9, 1], 990), "indices and entries of both, and the flag; 0 is nothing to hold"
    assert many == ([1000, 1], 0)


def test_steps_are_as_long_as_those_of_the_optimiser() -> None:
    """Without momentum, and once its running mean has settled, an optimiser moves by its step times the gradient."""
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.3),
        lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.0, 0.9)),
        lambda p: torch.optim.AdamW(p, lr=0.3, betas=(0.0, 0.9), weight_decay=0.0, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.3),
    ):
        weight = nn.Parameter(torch.zeros(4))
        optimizer, gradient = make([weight]), torch.tensor([1.0, -2.0, 1e-3, 30.0])
        steps = StepSizes(optimizer)
        for _ in range(2000):
            weight.grad = gradient.clone()
            optimizer.step()
        before, step = weight.detach().clone(), steps(weight)
        assert step is not None
        optimizer.step()
        torch.testing.assert_close(before - weight.detach(), step * gradient, rtol=1e-2, atol=0)
    assert StepSizes(torch.optim.Adam([weight]))(weight) is None, "before its first update"


def apart(world: int) -> dict[str, Any]:
    """Two servers, the first with one worker."""
    return {"servers": 2, "workers_per_server": world - 1, "server_sizes": [1, world - 1]}


def train_toy(folder: Path, toy: Toy, replicas: list[int], *arguments: str) -> State:
    """The weights after training; the first worker has a server to itself."""
    world = sum(replicas)
    write_plan(folder, [content | apart(world) for content in stage_contents(replicas)])
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), *arguments], toy, world)
    assert ended.statuses == [0] * world, ended.err
    return trained(folder / "run")[0]


@pytest.mark.parametrize("replicas", slow_but_for([[2, 1]], [[2], [3], [2, 1]]), ids=str)
def test_a_threshold_of_nothing_lets_everything_through(tmp_path: Path, replicas: list[int]) -> None:
    toy = Toy("sgd-fused", samples=33)
    ours = train_toy(tmp_path, toy, replicas, "--epochs", "2", "--significance", "0")
    toy_training.assert_close(ours, toy_training.train_literally(toy, replicas, epochs=2)[0])


def test_bf16_trains_to_about_the_same(tmp_path: Path) -> None:
    toy = Toy("sgd-fused", samples=33)
    ours = train_toy(tmp_path, toy, [2, 1], "--epochs", "2", "--compress", "bf16")
    exact = toy_training.train_literally(toy, [2, 1], epochs=2)[0]
    distance = {name: float((value - exact[name]).norm() / exact[name].norm()) for name, value in ours.items()}
    assert max(distance.values()) < 0.05
    assert distance["one.weight"] > 1e-5, "it is not exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "option"),
    [
        ([2], ("--compress", "bf16")),
        ([2], ("--compress", "powersgd:1:0")),
        ([2, 1], ("--compress", "powersgd:2:3")),
        ([3], ("--significance", "20%")),
        ([2, 1], ("--significance", "20%")),
    ],
    ids=str,
)
def test_what_is_held_back_does_not_matter_to_a_checkpoint(
    tmp_path: Path, replicas: list[int], option: tuple[str, str]
) -> None:
    """Bit by bit, a run that goes on after one of its checkpoints, within an epoch, equals one that was not stopped."""
    toy = Toy("adamw-fused", samples=61)
    always = ("--checkpoint-minibatches", "12", *option)
    straight = train_toy(tmp_path / "straight", toy, replicas, "--epochs", "2", *always)
    stopped = tmp_path / "stopped"
    train_toy(stopped, toy, replicas, "--epochs", "1", *always)
    resumed = train_toy(stopped, toy, replicas, "--epochs", "2", "--resume", *always)
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    exact = toy_training.train_literally(toy, replicas, epochs=2)[0]
    assert any(not torch.allclose(value, exact[name], rtol=1e-6) for name, value in straight.items())


def test_options_mean() -> None:
    for option, meant in (
        (["--compress", "bf16"], GradientAveraging(Compression("bf16"))),
        (["--compress", "powersgd"], GradientAveraging(Compression("powersgd", 1, 10))),
        (["--compress", "powersgd:4"], GradientAveraging(Compression("powersgd", 4, 10))),
        (["--compress", "powersgd:4:0"], GradientAveraging(Compression("powersgd", 4, 0))),
        (["--significance", "1%"], GradientAveraging(significance=0.01)),
        (["--significance", "0.5"], GradientAveraging(significance=0.5)),
        ([], GradientAveraging()),
    ):
        assert options_from(["plan", *option]).averaging == meant


def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for option, complaint in (
        (["--compress", "zip"], "'zip' is neither bf16 nor powersgd"),
        (["--compress", "powersgd:0"], "'powersgd:0' is neither"),
        (["--compress", "powersgd:x"], "'powersgd:x' is neither"),
        (["--significance", "100%"], "'100%' is not a share"),
        (["--significance", "nan"], "'nan' is not a share"),
        (["--significance", "-1%"], "expected one argument"),
        (["--significance", "1%", "--compress", "bf16"], "not allowed with argument"),
    ):
        with pytest.raises(SystemExit) as ended:
            options_from(["plan", *option])
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err


def test_an_option_that_changes_nothing_is_said(tmp_path: Path) -> None:
    compressed, filtered = GradientAveraging(Compression("bf16")), GradientAveraging(significance=0.1)
    for number, (counts, averaging, said) in enumerate(
        (
            ([1, 1, 1], compressed, "--compress changes nothing"),
            ([2, 1], compressed, None),
            ([1, 2], filtered, "--significance changes nothing"),
            ([2, 1], filtered, None),
            ([1, 1, 1], GradientAveraging(), None),
        )
    ):
        contents = [content | apart(sum(counts)) for content in stage_contents(counts)]
        plan = load_plan(write_plan(tmp_path / str(number), contents))
        noted = gradient_exchange.note_on_unused_option(averaging, plan)
        assert noted is None if said is None else said in str(noted)


def break_off(rank: int, folder: Path) -> None:
    """Replica 1 fails in the middle of a backward, when its first bucket is on its way."""
    first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    parameters = {"first": first, "last": last}

    def fail(_: Tensor) -> Tensor:
        raise ValueError("the model's own")

    reducer = GradientReducer(parameters, dist.group.WORLD, bucket_bytes=1)  # type: ignore[arg-type]
    said = ""
    try:
        with peer_loss_explained("the gradients did not come"), reducer.backward(parameters, 1.0, UpdateGroup(2.0)):
            hidden = first * 2
            if rank == 1:
                hidden.register_hook(fail)
            (hidden * last).sum().backward()
        with peer_loss_explained("the gradients did not come"):
            reducer.start(UpdateGroup(2.0))
            reducer.finish()
    except (PeerLost, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    torch.save(said, folder / f"result-{rank}.pt")
    os._exit(0)


def test_an_error_in_the_middle_of_backward_ends_the_others_too(tmp_path: Path) -> None:
    said = run(2, break_off, tmp_path, tmp_path)
    assert said[1] == "ValueError: the model's own"
    assert said[0].startswith("PeerLost: the gradients did not come")
