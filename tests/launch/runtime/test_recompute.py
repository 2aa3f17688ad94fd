"""A stage that recomputes ends up with the same bits as one that does not, and holds its input only in between."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from extents import slow_but_for
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from toy_training import BATCH, Held, engine, segment, train, trained
from toy_workers import Toy

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.schedule import SCHEDULES, ActionKind, StageShape
from pipeplan_launch.runtime.action_stream import run_stages
from pipeplan_launch.runtime.backward_passes import gradient_receive_posted
from pipeplan_launch.tracing.split import StageProgram, build_stage_program
from pipeplan_launch.tracing.trace import trace_job

WIDTH = 8
MINIBATCHES = 6
ACTIVATION = BATCH * WIDTH * 4


def losses(run: Path) -> dict[tuple[int, int], float]:
    lines = [json.loads(line) for path in (run / "metrics").iterdir() for line in path.read_text().splitlines()]
    return {(line["epoch"], line["minibatch"]): line["loss"] for line in lines if line["loss"] is not None}


@pytest.mark.parametrize("replicas", slow_but_for([[2, 1]], [[1, 1], [2, 1], [1, 1, 1]]), ids=str)
def test_workers_end_with_the_same_bits(tmp_path: Path, replicas: list[int]) -> None:
    """The toy has dropout everywhere and buffers that its output depends on; the optimiser has momentum."""
    toy = Toy(samples=21)
    plain, again = (
        train(tmp_path / name, toy, replicas, "--epochs", "2", recompute=[flag] * len(replicas))
        for name, flag in (("plain", False), ("again", True))
    )
    for ours, theirs in zip(trained(again), trained(plain), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert losses(again) == losses(plain)
    assert trained(again)[1]["two.calls"] == 2 * -(-11 // replicas[0])


@pytest.mark.parametrize(
    ("replicas", "depth", "flags"),
    [
        pytest.param([3, 2, 1], None, [True, True, True], marks=pytest.mark.slow),
        pytest.param([1, 2, 3], None, [True, False, True], marks=pytest.mark.slow),
        pytest.param([1, 1, 1], [12, 3, 1], [True, True, False], marks=pytest.mark.slow),
        pytest.param([2, 2], [9, 1], [True, False], marks=pytest.mark.slow),
        ([3, 1], [2, 2], [False, True]),
    ],
    ids=str,
)
def test_any_pipeline_runs_to_its_end(
    tmp_path: Path, replicas: list[int], depth: list[int] | None, flags: list[bool]
) -> None:
    """Also one far deeper than its neighbour has room for, and one that has fewer minibatches than replicas."""
    toy = Toy("sgd-fused", samples=5 if replicas == [3, 1] else 61)
    plain, again = (
        train(tmp_path / name, toy, replicas, "--epochs", "1", depth=depth, recompute=[flag and one for one in flags])
        for name, flag in (("plain", False), ("again", True))
    )
    for ours, theirs in zip(trained(again), trained(plain), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_gradient_is_thought_awaited_only_where_its_receive_is_posted(replicas: int, depth: int) -> None:
    """Against the stream of actions, posting as the engine does."""
    shapes = [StageShape(replicas, depth), StageShape(1, 1)]
    for replica in range(replicas):
        posted, missed = set(), 0
        for action in SCHEDULES["1f1b-stashing"].stream(shapes, 0, replica, 20):
            if action.kind is ActionKind.BACKWARD:
                posted.add(action.index + replicas)
            if action.kind is ActionKind.FORWARD:
                posted |= {action.index} if action.index < replicas else set()
                sent = range(replica, action.index + 1, replicas)
                thought = {one for one in sent if gradient_receive_posted(one, action.index, replicas, depth)}
                assert thought <= posted
                missed += len(posted & set(sent) - thought)
        assert missed == 0, "and wherever it is"


class Residual(nn.Module):
    """Normalises, and keeps a moving figure that its output depends on; a table is only read."""

    figure: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("figure", torch.zeros(2, WIDTH))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.figure[0].lerp_(x.detach().mean(0), 0.1)
        first, _ = self.table.chunk(2)
        return x + torch.relu(self.linear(self.norm(x)) + self.figure[0]) + first.sum()


class Mixed(nn.Module):
    """A region in lower precision, with a norm in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.norm(self.one(x)).relu()
        return self.two(x.float())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 2, WIDTH // 2).repeat(1, 1, 2)
        mixed: Tensor = self.inner(rows, rows, rows, need_weights=False)[0]
        return mixed.mean(1)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))),
    "batchnorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), Residual()),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.GELU(), nn.Dropout(0.2)),
    "autocast": Mixed,
    "attention": Attention,
}


def job_of(middle: str) -> Job:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(MIDDLES[middle]()), nn.Linear(WIDTH, WIDTH))
    return Job(
        net,
        inputs=lambda n: torch.randn(n, WIDTH),
        loss=functional.mse_loss,
        optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    )


def middle_stage(middle: str) -> tuple[StageProgram, Job]:
    job = job_of(middle)
    traced = trace_job(job, BATCH)
    names = [layer.name for layer in traced.layers]
    pipeline = [names[:1], names[1:-2], names[-2:]]
    return build_stage_program(traced, pipeline, 1), job


def whole_segment() -> Any:
    torch.manual_seed(4)
    return segment(torch.randn(BATCH * MINIBATCHES, WIDTH), torch.randn(BATCH * MINIBATCHES, WIDTH))


def state_of(program: Any) -> dict[str, Tensor]:
    return {**program.parameters_by_name(), **program.buffers_by_name()}


def assert_same(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        pairs = zip(value, theirs[name], strict=True) if isinstance(value, list) else [(value, theirs[name])]
        assert all(torch.equal(one, other) for one, other in pairs), name


@pytest.mark.parametrize("middle", MIDDLES)
def test_a_stage_computes_the_same_bits(tmp_path: Path, middle: str) -> None:
    """What it sends both ways, its weights, its buffers, and where the random generators end."""
    ends = []
    for recompute in (False, True):
        program, job = middle_stage(middle)
        before = {name: tensor.clone() for name, tensor in state_of(program).items()}
        training, neighbours = engine(tmp_path, program, job, 1, [5, 3, 1], recompute=recompute)
        run_stages([training], whole_segment())
        assert len(neighbours.sent) == 2 * MINIBATCHES
        assert any(not torch.equal(tensor, before[name]) for name, tensor in state_of(program).items())
        ends.append((neighbours.sent, state_of(program), {"rng": torch.get_rng_state()}))
    for ours, theirs in zip(*ends, strict=True):
        assert_same(ours, theirs)


def test_only_what_a_forward_may_write_is_copied() -> None:
    program, _ = middle_stage("batchnorm")
    names = {name.rpartition(".")[2] for name in program.changing_state()}
    assert names == {"running_mean", "running_var", "num_batches_tracked", "figure"}
    assert "table" in {name.rpartition(".")[2] for name in program.buffers_by_name()}


def test_state_in_a_region_counts_as_written() -> None:
    program, _ = middle_stage("autocast")
    assert {name.rpartition(".")[2] for name in program.changing_state()} >= {"running_mean", "running_var"}


@pytest.mark.parametrize("middle", ["chain", "batchnorm", "dropout"])
def test_a_minibatch_in_flight_holds_the_input_only(tmp_path: Path, middle: str) -> None:
    """Counted: all memory that operators made, when each forward begins and when each backward has its outputs."""
    growth, peak = {}, {}
    for recompute in (False, True):
        program, job = middle_stage(middle)
        training, neighbours = engine(tmp_path, program, job, 1, [6, 4, 1], recompute=recompute)
        held = Held()
        seen: list[tuple[Direction, int]] = []

        def note(direction: Direction, _minibatch: int, held: Held = held, seen: Any = seen) -> None:
            seen.append((direction, held.bytes))

        neighbours.before_taking = note
        with held:
            run_stages([training], whole_segment())
        fill = [count for direction, count in itertools.takewhile(lambda one: one[0] is Direction.ACTIVATIONS, seen)]
        assert len(fill) == 4
        steps = {after - before for before, after in itertools.pairwise(fill)}
        assert len(steps) == 1, "every minibatch in flight holds the same"
        growth[recompute] = steps.pop()
        peak[recompute] = next(count for direction, count in seen if direction is Direction.GRADIENTS) - fill[0]
        state = sum(tensor.nbytes for tensor in program.changing_state().values())
        assert (neighbours.most_leaving, neighbours.most_awaited) == ((1, 1) if recompute else (4, 4))
    assert growth[True] == ACTIVATION + state
    assert growth[False] >= 2 * ACTIVATION
    # In flight 4: the inputs of all, and of one what it saves.
    assert peak[True] <= 4 * growth[True] + growth[False] + ACTIVATION
    assert peak[True] < peak[False]


class Plain:
    """A program of one stage that is not traced, for what a test wants to do in it."""

    receives: Sequence[Any] = ()
    sends: Sequence[Any] = ()
    model_inputs = (0,)
    shared: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self._run = run

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight}

    def buffers_by_name(self) -> dict[str, Tensor]:
        return {}

    def changing_state(self) -> dict[str, Tensor]:
        return {}

    def call(
        self, parameters: Mapping[str, Tensor], _received: Sequence[Tensor], inputs: Sequence[Tensor], _batch: int
    ) -> Tensor:
        return self._run(inputs[0], parameters["weight"])

    def train(self, _mode: bool = True) -> None:
        raise NotImplementedError

    def eval(self) -> None:
        raise NotImplementedError


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    """Draws from Python's generator, too, and writes to the target."""
    target.mul_(0.5)
    return functional.mse_loss(output * random.random(), target)


def trained_weight(tmp_path: Path, run: Callable[[Tensor, Tensor], Tensor], loss: Any, recompute: bool) -> Tensor:
    random.seed(8)
    program = Plain(run)
    job = Job(
        nn.Module(),
        inputs=lambda n: torch.zeros(n, WIDTH),
        loss=loss,
        optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    )
    training, _ = engine(tmp_path, program, job, 0, [3], recompute=recompute)
    run_stages([training], whole_segment())
    return program.weight.detach()


def test_data_that_is_written_to_is_read_again(tmp_path: Path) -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return functional.dropout(x.add_(1) * weight, 0.3)

    plain, again = (trained_weight(tmp_path, run, noisy_loss, flag) for flag in (False, True))
    assert torch.equal(plain, again)
    assert not torch.equal(plain, torch.linspace(-1, 1, WIDTH))


def test_a_forward_that_differentiates_is_refused_in_one_line(tmp_path: Path) -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        value = (x * weight).square().sum()
        return x * weight * torch.autograd.grad(value, weight)[0]

    trained_weight(tmp_path, run, functional.mse_loss, recompute=False)
    with pytest.raises(LaunchError, match=r"differentiates inside itself.*--no-recompute") as caught:
        trained_weight(tmp_path, run, functional.mse_loss, recompute=True)
    assert "\n" not in str(caught.value)


def test_a_loss_may_differentiate(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = functional.mse_loss(output, target)
        slope = torch.autograd.grad(value, output, create_graph=True)[0]
        return value + slope.square().sum()

    plain, again = (trained_weight(tmp_path, lambda x, w: (x * w).tanh(), loss, flag) for flag in (False, True))
    assert torch.equal(plain, again)
