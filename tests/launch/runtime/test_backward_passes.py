"""Passes that recompute give the same bits and hold their input only; passes in two parts give the same gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import curve
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from toy_training import BATCH, Held, engine, segment, train, trained
from toy_workers import Toy

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.schedule import SCHEDULES, ActionKind, StageShape
from pipeplan_launch.runtime.action_stream import run_stages
from pipeplan_launch.runtime.backward_passes import SplitBackward, gradient_receive_posted
from pipeplan_launch.tracing.split import StageProgram, build_stage_program
from pipeplan_launch.tracing.trace import trace_job

torch.set_num_threads(1)
WIDTH = 8
MINIBATCHES = 6
ACTIVATION = BATCH * WIDTH * 4


def assert_same(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        pairs = zip(value, theirs[name], strict=True) if isinstance(value, list) else [(value, theirs[name])]
        assert all(torch.equal(one, other) for one, other in pairs), name


PIPELINES: list[Any] = [
    ([3, 1], [2, 2], [False, True], 5),
    ([1, 2, 3], None, [True, False, True], 61),
    ([1, 1, 1], [12, 3, 1], [True, True, False], 61),
    ([2, 2], [9, 1], [True, False], 61),
]
"""Also one that is far deeper than its neighbour has room for, and one that has fewer minibatches than replicas."""


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES, ids=str)
def test_any_pipeline_ends_with_the_same_bits(tmp_path: Path, case: Any) -> None:
    replicas, depth, flags, samples = case
    toy = Toy("sgd-fused", samples=samples)
    plain, again = (
        train(tmp_path / name, toy, replicas, "--epochs", "1", depth=depth, recompute=[flag and one for one in flags])
        for name, flag in (("plain", False), ("again", True))
    )
    for ours, theirs in zip(trained(again), trained(plain), strict=True):
        assert_same(ours, theirs)
    assert curve(again) == curve(plain)


def test_a_gradient_is_thought_awaited_only_where_its_receive_is_posted() -> None:
    """Against the stream of actions, posting as the engine does."""
    for replicas, depth in itertools.product((1, 2, 3), (1, 2, 3, 5)):
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


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), Residual()),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.GELU(), nn.Dropout(0.2)),
    "autocast": Mixed,
}


def middle_stage(middle: str) -> tuple[StageProgram, Job]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(MIDDLES[middle]()), nn.Linear(WIDTH, WIDTH))
    job = job_of(net, functional.mse_loss)
    traced = trace_job(job, BATCH)
    names = [layer.name for layer in traced.layers]
    return build_stage_program(traced, [names[:1], names[1:-2], names[-2:]], 1), job


def job_of(model: nn.Module, loss: Any) -> Job:
    def with_momentum(parameters: list[nn.Parameter]) -> SGD:
        return SGD(parameters, lr=0.05, momentum=0.9)

    return Job(model, inputs=lambda n: torch.randn(n, WIDTH), loss=loss, optimizer=with_momentum)


def whole_segment() -> Any:
    torch.manual_seed(4)
    return segment(torch.randn(BATCH * MINIBATCHES, WIDTH), torch.randn(BATCH * MINIBATCHES, WIDTH))


@pytest.mark.parametrize("middle", MIDDLES)
def test_a_stage_that_recomputes_gives_the_same_bits_and_holds_the_input_only(tmp_path: Path, middle: str) -> None:
    """What it sends both ways, its weights, its buffers, and where the random generators end.

    Counted is all memory that operators made, when each forward begins and when each backward has its outputs.
    """
    growth, peak, ends = {}, {}, []
    for recompute in (False, True):
        program, job = middle_stage(middle)
        weights = {name: tensor.clone() for name, tensor in program.parameters_by_name().items()}
        training, neighbours = engine(tmp_path, program, job, 1, [6, 4, 1], recompute=recompute)
        held, seen = Held(), list[tuple[Direction, int]]()

        def note(direction: Direction, _minibatch: int, held: Held = held, seen: Any = seen) -> None:
            seen.append((direction, held.bytes))

        neighbours.before_taking = note
        with held:
            run_stages([training], whole_segment())
        assert len(neighbours.sent) == 2 * MINIBATCHES
        assert any(not torch.equal(tensor, weights[name]) for name, tensor in program.parameters_by_name().items())
        state = {**program.parameters_by_name(), **program.buffers_by_name()}
        ends.append((neighbours.sent, state, {"rng": torch.get_rng_state()}))
        fill = [count for direction, count in itertools.takewhile(lambda one: one[0] is Direction.ACTIVATIONS, seen)]
        assert len(fill) == 4
        steps = {after - before for before, after in itertools.pairwise(fill)}
        assert len(steps) == 1 or middle == "autocast", "every minibatch in flight holds the same"
        growth[recompute] = steps.pop()
        peak[recompute] = next(count for direction, count in seen if direction is Direction.GRADIENTS) - fill[0]
        assert (neighbours.most_leaving, neighbours.most_awaited) == ((1, 1) if recompute else (4, 4))
    for ours, theirs in zip(*ends, strict=True):
        assert_same(ours, theirs)
    written = {name.rpartition(".")[2] for name in program.changing_state()}
    if middle == "autocast":
        assert written >= {"running_mean", "running_var"}
        return
    assert growth[True] == ACTIVATION + sum(tensor.nbytes for tensor in program.changing_state().values())
    assert growth[False] >= 2 * ACTIVATION
    # In flight 4: the inputs of all, and of one what it saves.
    assert peak[True] <= 4 * growth[True] + growth[False] + ACTIVATION
    assert peak[True] < peak[False]
    statistics = {"running_mean", "running_var", "num_batches_tracked", "figure"}
    assert written == (statistics if middle == "batchnorm" else set()), "only what a forward may write is copied"


def trained_weight(tmp_path: Path, run: Callable[[Tensor, Tensor], Tensor], loss: Any, recompute: bool) -> Tensor:
    """The weight of a stage that is not traced, after six minibatches."""
    random.seed(8)
    weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
    program: Any = SimpleNamespace(
        receives=(),
        sends=(),
        model_inputs=(0,),
        shared={},
        parameters_by_name=lambda: {"weight": weight},
        buffers_by_name=dict,
        changing_state=dict,
        call=lambda parameters, _received, inputs, _batch: run(inputs[0], parameters["weight"]),
    )
    training, _ = engine(tmp_path, program, job_of(nn.Module(), loss), 0, [3], recompute=recompute)
    run_stages([training], whole_segment())
    return weight.detach()


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    """Draws from Python's generator, too, and writes to the target."""
    target.mul_(0.5)
    return functional.mse_loss(output * random.random(), target)


def slope_loss(output: Tensor, target: Tensor) -> Tensor:
    """Differentiates."""
    value = functional.mse_loss(output, target)
    return value + torch.autograd.grad(value, output, create_graph=True)[0].square().sum()


def test_data_that_is_written_to_is_read_again_and_a_loss_may_differentiate(tmp_path: Path) -> None:
    for run, loss in (
        (lambda x, weight: functional.dropout(x.add_(1) * weight, 0.3), noisy_loss),
        (lambda x, weight: (x * weight).tanh(), slope_loss),
    ):
        plain, again = (trained_weight(tmp_path, run, loss, flag) for flag in (False, True))
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


# Backward passes in two parts.


class Doubled(torch.autograd.Function):
    """A node written in Python, which may be executed only once."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = (x, weight)  # type: ignore[attr-defined]
        return x * weight

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.kept  # type: ignore[attr-defined]
        del ctx.kept  # type: ignore[attr-defined]
        return gradients[0] * weight, gradients[0] * x


STAGES: dict[str, Callable[[dict[str, Tensor], Tensor], Sequence[Tensor]]] = {
    "plain": lambda w, x: [linear(linear(x, w["a"], w["e"]).relu(), w["b"])],
    "used twice": lambda w, x: [linear(linear(x, w["a"]).tanh(), w["a"].t()) + linear(x, w["b"])],
    "skips": lambda w, x: [linear(inside := linear(x, w["a"]).relu(), w["b"]), inside * 2, x * w["e"]],
    # One output that no input leads to, and a weight that goes into it and into another.
    "apart": lambda w, x: [linear(x, w["a"]), linear(w["b"], w["a"]) * w["e"].sum()],
    "normed": lambda w, x: [attend(functional.layer_norm(functional.dropout(x, 0.3), (4,), w["e"], w["f"]), w)],
    "in Python": lambda w, x: [Doubled.apply(linear(x, w["a"]), w["e"]).sin()],
    "checkpointed": lambda w, x: [
        linear(checkpoint(lambda y: linear(y, w["a"]).tanh(), x, use_reentrant=False), w["b"])
    ],
    "unused": lambda w, x: [x * 2, linear(x, w["a"].detach(), w["e"])],
    "in views": lambda w, x: [gated(*linear(x, torch.cat([w["a"], w["b"]])).chunk(2, -1)) + w["a"].sum()],
}


def gated(first: Tensor, second: Tensor) -> Tensor:
    return first * second.sigmoid()


def attend(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    both = torch.cat([w["a"], w["b"], w["c"]])
    return functional.multi_head_attention_forward(
        *(x, x, x, 4, 2, both, None, None, None, False, 0.0, w["c"], None), need_weights=False
    )[0]


@pytest.mark.parametrize("stage", STAGES)
def test_two_parts_give_the_gradients_of_one(stage: str) -> None:
    results = []
    for splits in (False, True):
        torch.manual_seed(1)
        weights = {name: torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for name in "abc"}
        weights |= {name: torch.randn(4, dtype=torch.float64, requires_grad=True) for name in "ef"}
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        roots = STAGES[stage](weights, x)
        gradients = [torch.randn_like(root) for root in roots]
        if splits:
            split = SplitBackward(roots, [x], weights.values())
            split.inputs(gradients)
            assert all(weight.grad is None for weight in weights.values())
            sent = None if x.grad is None else x.grad.clone()
            split.weights()
            assert x.grad is sent or torch.equal(x.grad, sent)  # type: ignore[arg-type]
        else:
            torch.autograd.backward(roots, gradients)
        results.append([one.grad for one in (x, *weights.values())])
    for once, twice in zip(*results, strict=True):
        assert (once is None) == (twice is None)
        if once is not None and twice is not None:
            torch.testing.assert_close(once, twice, rtol=1e-12, atol=1e-12)


def test_weights_wait_where_they_can() -> None:
    """Every weight of modules used once gets its gradient in the second part, and none of the others."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)).double()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    split = SplitBackward([model(x)], [x], model.parameters())
    assert sum(len(one.leaves) for one in split._deferred) == len(list(model.parameters()))
    weights = {name: torch.randn(4, 4, requires_grad=True) for name in "ab"}
    roots = STAGES["used twice"](weights, torch.randn(3, 4, requires_grad=True))
    assert not SplitBackward(roots, [], weights.values())._deferred
    lstm = nn.LSTM(4, 4, 2).double()  # its cells share weights
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    output = lstm(x)[0]
    gradient = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, *lstm.parameters()], gradient, retain_graph=True)
    split = SplitBackward([output], [x], lstm.parameters())
    split.inputs([gradient])
    split.weights()
    for one, weight in zip(expected, [x, *lstm.parameters()], strict=True):
        torch.testing.assert_close(one, weight.grad, rtol=1e-12, atol=1e-12)
