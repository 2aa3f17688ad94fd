"""Several processes that average their gradients, against one that averages literally."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import replicas
import torch
import torch.distributed as dist
from replicas import RATE, Group, Minibatch, Model, groups, mean_gradients, run, step, train, train_literally
from torch import Tensor, nn

from pipeplan_launch.comm.buckets import Bucket, UpdateGroup, as_real, make_buckets
from pipeplan_launch.comm.gaia_filter import ReplicasByServer, SignificanceFilter, StepSizes
from pipeplan_launch.comm.gradient_allreduce import GradientReducer
from pipeplan_launch.comm.gradient_exchange import compressed_exchange
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.run_options import Compression

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


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("world", "each", "bytes_"), [(2, 1, ONE_EACH), (2, 3, ONE_EACH), (3, 2, ONE_BUCKET)])
def test_the_mean_is_that_of_one_process(tmp_path: Path, world: int, each: int, bytes_: int, early: bool) -> None:
    given = groups(world, 6, each=each)
    results = run(world, train, tmp_path, given, bytes_, early, None)
    assert_agree(results)
    assert_close(results[0], train_literally(given))
    assert torch.equal(results[0]["unused"], torch.ones(2)), "a parameter without a gradient is left alone"


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


def twice(rank: int, bytes_: int) -> str:
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


@pytest.mark.parametrize(
    ("bytes_", "outcome"), [(ONE_BUCKET, "[2.0, 2.0, 2.0]"), (ONE_EACH, "made the gradient of 'w' again")]
)
def test_a_second_gradient_is_added_or_refused_but_not_lost(tmp_path: Path, bytes_: int, outcome: str) -> None:
    assert all(outcome in result for result in run(2, twice, tmp_path, bytes_))


def test_types_do_not_share_a_bucket_and_buckets_come_in_the_order_of_backward() -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
    parameters = {f"p{i}": nn.Parameter(torch.zeros(2, dtype=kind)) for i, kind in enumerate(kinds)}
    made = make_buckets(parameters)
    assert [list(bucket.views) for bucket in made] == [["p3", "p1"], ["p4", "p2", "p0"]]
    assert [(bucket.index, bucket.is_last) for bucket in made] == [(0, False), (1, True)]


# Compression


def bf16(group: dist.ProcessGroup, _parameters: object) -> Any:
    return compressed_exchange(group, Compression("bf16"))


def powersgd(group: dist.ProcessGroup, _parameters: object) -> Any:
    return compressed_exchange(group, Compression("powersgd", rank=2, exact=2))


@pytest.mark.parametrize("bytes_", [ONE_EACH, ONE_BUCKET])
def test_bf16_sums_in_bfloat16(tmp_path: Path, bytes_: int) -> None:
    given = groups(2, 3)[:2]  # without the short group
    results = run(2, train, tmp_path, given, bytes_, True, bf16)
    assert_agree(results)
    model = Model()
    parameters = dict(model.named_parameters())
    for update in given:
        each = [mean_gradients(model, replica) for replica in update]
        names = each[0].keys() | each[1].keys()
        halves = {name: [(as_real(one[name]).bfloat16() / 2) for one in each if name in one] for name in names}
        step(parameters, {name: like(parameters[name], sum(given[1:], given[0])) for name, given in halves.items()})
    assert_close(results[0], {name: one.detach() for name, one in parameters.items()})


def like(parameter: Tensor, numbers: Tensor) -> Tensor:
    """Real numbers as a gradient of the parameter's type."""
    made = numbers.to(as_real(parameter.detach()).dtype)
    return torch.view_as_complex(made) if parameter.is_complex() else made


def by_ddp(rank: int, given: list[Group], hook_state: dict[str, Any]) -> State:
    """What torch's own DDP makes of it, with the same hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    model = plain_model()
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(PowerSGDState(dist.group.WORLD, **hook_state), powerSGD_hook)
    for update in given:
        ((inputs, _, _),) = update[rank]
        model.zero_grad()
        parallel(inputs).square().mean().backward()
        step(dict(model.named_parameters()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, 7))


WIDE = replicas.WIDTH


def by_us(rank: int, given: list[Group]) -> State:
    model = plain_model()
    parameters = dict(model.named_parameters())
    reducer = GradientReducer(parameters, dist.group.WORLD, powersgd(dist.group.WORLD, None))  # type: ignore[arg-type]
    for number, update in enumerate(given):
        ((inputs, _, _),) = update[rank]
        with reducer.backward(parameters, 1.0, UpdateGroup(2.0, number)):
            model(inputs).square().mean().backward()
        reducer.start(UpdateGroup(2.0, number))
        step(parameters, reducer.finish())
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_powersgd_is_that_of_ddp(tmp_path: Path) -> None:
    """Two exact updates, then four with error feedback and a warm start."""
    given = groups(2, 7)[:6]
    settings = {
        "matrix_approximation_rank": 2,
        "start_powerSGD_iter": 2,
        "orthogonalization_epsilon": 1e-8,
        "random_seed": 2,
    }
    for name in ("ddp", "ours"):
        (tmp_path / name).mkdir()
    wanted = run(2, by_ddp, tmp_path / "ddp", given, settings)
    ours = run(2, by_us, tmp_path / "ours", given)
    assert_agree(ours)
    assert_close(ours[0], wanted[0])
    exact = plain_model()
    for update in given:
        both = [mean_gradients(Plain(exact), replica) for replica in update]
        step(
            dict(exact.named_parameters()),
            {n.removeprefix("inner."): (both[0][n] + both[1][n]) / 2 for n in both[0]},
        )
    assert not torch.allclose(dict(exact.named_parameters())["0.weight"], ours[0]["0.weight"], rtol=1e-3), (
        "it compresses"
    )


class Plain(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor, _: bool) -> Tensor:
        result: Tensor = self.inner(inputs).square().mean()
        return result


class Fixed(nn.Module):
    """Its gradients are its inputs, whatever its weights are: so that what travels can be added up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDE, WIDE))
        self.bias = nn.Parameter(torch.ones(WIDE))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.weight * (inputs.T @ inputs)).sum() + (self.bias * inputs[0]).sum()


def sums(rank: int, given: list[Group], make: Any, servers: list[list[int]]) -> list[State]:
    """The mean gradient as each update delivers it."""
    model = Fixed()
    parameters = dict(model.named_parameters())
    group: Any = dist.group.WORLD
    reducer = GradientReducer(parameters, group, make(group, servers, rank))
    delivered = []
    for number, update in enumerate(given):
        ((inputs, _, _),) = update[rank]
        of = UpdateGroup(float(len(update)), number, ends_segment=number == len(given) - 1)
        with reducer.backward(parameters, 1.0, of):
            model(inputs).backward()
        reducer.start(of)
        delivered.append({name: one.clone() for name, one in reducer.finish().items()})
    return delivered


def make_powersgd(group: dist.ProcessGroup, _servers: object, _rank: int) -> Any:
    return compressed_exchange(group, Compression("powersgd", rank=1, exact=0))


def make_filter(group: dist.ProcessGroup, servers: list[list[int]], rank: int) -> Any:
    return SignificanceFilter(ReplicasByServer(servers, rank, group), 0.5, lambda _: 0.1)


def whole_groups(world: int, updates: int) -> list[Group]:
    return groups(world, updates + 1)[:updates]


def exact_sum(given: list[Group]) -> State:
    model = Fixed()
    total: State = {}
    for update in given:
        for replica in update:
            model.zero_grad()
            model(replica[0][0]).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                total[name] = total.get(name, torch.zeros(())) + parameter.grad / len(update)
    return total


@pytest.mark.parametrize(
    ("make", "servers"),
    [(make_powersgd, [[0], [1]]), (make_filter, [[0], [1]]), (make_filter, [[0, 1], [2]])],
    ids=["powersgd", "filter", "filter-of-two-on-a-server"],
)
def test_nothing_is_lost(tmp_path: Path, make: Any, servers: list[list[int]]) -> None:
    """What is held back travels later, and all that is left of it with the segment's last update."""
    world = sum(map(len, servers))
    given = whole_groups(world, 5)
    results = run(world, sums, tmp_path, given, make, servers)
    for mine in results:
        assert all(torch.equal(one[name], mine[i][name]) for i, one in enumerate(results[0]) for name in one)
    total = {name: sum(one[name] for one in results[0]) for name in results[0][0]}
    assert_close(total, exact_sum(given))
    before = {name: sum(one[name] for one in results[0][:-1]) for name in results[0][0]}
    early = exact_sum(given[:-1])
    assert any(not torch.allclose(before[name], early[name], rtol=1e-2) for name in early), "something was held back"


# Significance


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


def make_servers_filter(group: dist.ProcessGroup, _parameters: object) -> Any:
    return SignificanceFilter(ReplicasByServer([[0, 1], [2]], dist.get_rank(), group), 0.1, lambda _: RATE)


@pytest.mark.parametrize("bytes_", [ONE_EACH, ONE_BUCKET])
def test_the_filter_follows_its_rule(tmp_path: Path, bytes_: int) -> None:
    given = groups(3, 6)
    results = run(3, train, tmp_path, given, bytes_, True, make_sparse_filter)
    assert_agree(results)
    assert_close(results[0], filtered_literally(given, [[0, 1], [2]], 0.1, RATE))


def make_sparse_filter(group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> Any:
    """Never all of a bucket, however small it is: the rule is then that of single entries."""
    from pipeplan_launch.comm import gaia_filter

    gaia_filter._INDEX_BYTES = -100
    return make_servers_filter(group, parameters)


def bytes_between(rank: int, share: float) -> tuple[list[int], int]:
    """Elements that a speaker hands to Gloo for each of two updates; and how many entries it holds back then."""
    sent: list[int] = []
    for name in ("all_reduce", "broadcast"):
        really = getattr(dist, name)

        def counted(tensor: Tensor, *given: Any, really: Any = really, **options: Any) -> Any:
            sent.append(tensor.numel())
            return really(tensor, *given, **options)

        setattr(dist, name, counted)
    weight = nn.Parameter(torch.ones(1000))
    (bucket,) = make_buckets({"w": weight})
    group: Any = dist.group.WORLD
    exchange = SignificanceFilter(ReplicasByServer([[0], [1]], rank, group), share, lambda _: 1.0)
    bucket.values.copy_(torch.arange(1000.0) / 1000)
    exchange(bucket, UpdateGroup())
    return sent, sum(int((one != 0).sum()) for one in exchange._held.values())


def test_few_entries_travel_alone_and_many_all_together(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    few = run(2, bytes_between, tmp_path / "few", 0.99)
    assert few[0] == ([9, 9, 9, 9, 1], 990), "indices and entries of both, and the flag; 0 is nothing to hold"
    (tmp_path / "many").mkdir()
    assert run(2, bytes_between, tmp_path / "many", 0.2)[0] == ([1000, 1], 0)


def test_a_hook_sees_what_ddp_would_give_it() -> None:
    from pipeplan_launch.comm.gradient_exchange import HookBucket

    weights = {"number": nn.Parameter(torch.tensor(1.0)), "matrix": nn.Parameter(torch.ones(2, 3))}
    bucket = Bucket(weights, 4, True)
    seen = HookBucket(bucket)
    assert [tuple(one.shape) for one in seen.gradients()] == [(1,), (2, 3)]
    assert (seen.index(), seen.is_last(), seen.buffer().shape) == (4, True, (7,))
    assert seen.parameters() == list(weights.values())
    seen.buffer().fill_(2.0)
    assert bucket.views["matrix"].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.3),
        lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.0, 0.9)),
        lambda p: torch.optim.AdamW(p, lr=0.3, betas=(0.0, 0.9), weight_decay=0.0, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.3),
    ],
    ids=["sgd", "adam", "adamw-fused", "rmsprop"],
)
def test_steps_are_as_long_as_those_of_the_optimiser(make: Any) -> None:
    """Without momentum, and once its running mean has settled, an optimiser moves by its step times the gradient."""
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


def test_before_its_first_update_adam_has_no_step() -> None:
    weight = nn.Parameter(torch.zeros(4))
    assert StepSizes(torch.optim.Adam([weight]))(weight) is None
