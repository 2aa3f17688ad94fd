"""The toy of `toy_workers`, trained by real workers, in one process by the formula (`literal.py`), or one stage of it.

A stage alone is trained in this process: what its neighbours would send is made up, the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import literal
import torch
from saved import latest, model_of
from schedule_rules import depths_for
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from toy_jobs import LIMIT
from toy_workers import (
    OPTIMIZERS,
    Toy,
    initial,
    initial_buffers,
    run_layer,
    run_toy,
    split_layers,
    stage_contents,
    toy_data,
    write_plan,
)

from pipeplan_launch.comm.p2p import MessageTensor, Transport
from pipeplan_launch.job.job import Job
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.runtime.data import Batches, minibatch_sizes
from pipeplan_launch.runtime.engine import Segment, StageContext
from pipeplan_launch.runtime.pipeline_training import PipelineTraining
from pipeplan_launch.telemetry.recorder import Recorder
from pipeplan_launch.tracing.subgraph import Program

State = dict[str, Tensor]
LAYERS = ("one", "two", "three")


class _Layer(nn.Module):
    """A layer of the toy as a module."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        for name, weight in initial()[number].items():
            self.register_parameter(name.partition(".")[2], nn.Parameter(weight))
        for name, buffer in initial_buffers()[number].items():
            self.register_buffer(name.partition(".")[2], buffer)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """What the next cut holds."""
        tensors = ({f"{LAYERS[self.number]}.{name}": one for name, one in own} for own in self._tensors())
        return run_layer(self.number, *tensors, given, self.training)

    def _tensors(self) -> tuple[Any, Any]:
        return self.named_parameters(recurse=False), self.named_buffers(recurse=False)


class _WholeToy(nn.Module):
    """The toy as one module."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(LAYERS):
            self.add_module(name, _Layer(number))

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        given: tuple[Tensor, ...] = (x,)
        for layer in self.children():
            given = layer(*given)
        return given[0]


def train_literally(
    toy: Toy, replicas: list[int], epochs: int, schedule: str = "1f1b-stashing", accumulate: int | None = None
) -> tuple[State, State]:
    """(weights, buffers) after the epochs, by the formula."""
    recipe = literal.Recipe(
        schedule,
        tuple(replicas),
        tuple(depths_for(replicas)),
        accumulate or 1,
        2,
        epochs,
        clip=LIMIT if toy.features == "clip" else None,
        drops_last=not toy.dynamic,
    )
    cuts = [LAYERS[layers[0]] for layers in split_layers(len(replicas))[1:]]
    optimizer, data = OPTIMIZERS[toy.optimizer], toy_data(toy).train
    left = literal.train(_WholeToy(), cuts, data, functional.cross_entropy, optimizer, recipe)
    weights, buffers = (
        {name: one for state in states for name, one in state.items()} for states in (left.parameters, left.buffers)
    )
    return weights, buffers


def trained(run: Path) -> tuple[State, State]:
    """(weights, buffers) of a run's last checkpoint."""
    state = model_of(latest(run))
    known = {name for layer in initial_buffers() for name in layer}
    return (
        {name: value for name, value in state.items() if name not in known},
        {name: value for name, value in state.items() if name in known},
    )


def assert_close(ours: State, theirs: State, tolerance: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def train(folder: Path, toy: Toy, replicas: list[int], *arguments: str, **plan: Any) -> Path:
    ended = run_toy(folder, toy, replicas, *arguments, **plan)
    assert not any(ended.statuses), ended.err
    return folder / "run"


BATCH = 4


class Neighbours(Transport):
    """Hands out tensors that depend on their minibatch only, and notes what is sent."""

    def __init__(self) -> None:
        super().__init__(0, 0, torch.device("cpu"))
        self.sent: dict[tuple[Direction, int], list[Tensor]] = {}
        self.before_taking: Callable[[Direction, int], None] = lambda _direction, _minibatch: None
        self.leaving: set[tuple[Direction, int]] = set()
        self.most_leaving = self.most_awaited = 0
        """Most activations that were sent and not settled, and most gradients that were awaited, at once."""
        self._wires: dict[tuple[Direction, int], list[MessageTensor]] = {}

    def post(self, direction: Direction, minibatch: int, source: int, wires: Sequence[MessageTensor]) -> None:
        assert (direction, minibatch) not in self._wires
        self._wires[direction, minibatch] = list(wires)
        self.most_awaited = max(self.most_awaited, sum(one is Direction.GRADIENTS for one, _ in self._wires))

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        self.before_taking(direction, minibatch)
        generator = torch.Generator().manual_seed(2 * minibatch + direction)
        return [
            torch.randn(wire.shape, dtype=wire.dtype, generator=generator)
            for wire in self._wires.pop((direction, minibatch))
        ]

    def settle(self, direction: Direction, minibatch: int) -> None:
        self.leaving.discard((direction, minibatch))

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        self.leaving.add((direction, minibatch))
        self.most_leaving = max(self.most_leaving, sum(one is Direction.ACTIVATIONS for one, _ in self.leaving))
        with torch.utils._python_dispatch._disable_current_modes():  # what a test counts leaves these out
            self.sent[direction, minibatch] = [tensor.detach().clone() for tensor in tensors]


class Held(TorchDispatchMode):
    """Notes the memory that operators make, to say how much of it is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}  # views of these are not new
        for storage in _storages(result):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def bytes(self) -> int:
        """Bytes of what was made inside and is still held by anyone, autograd included."""
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        return sum(size for _, size in self._made.values())


def _storages(value: Any) -> list[torch.UntypedStorage]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]


def engine(
    folder: Path, program: Program, job: Job, stage: int, depths: Sequence[int], *, recompute: bool
) -> tuple[PipelineTraining, Neighbours]:
    """The engine of one stage of a straight pipeline of these depths, and what it talks to."""
    contents = stage_contents([1] * len(depths), depths, BATCH, recompute=[recompute] * len(depths))
    plan = load_plan(write_plan(folder, contents))
    neighbours = Neighbours()
    place = StageContext(plan, stage, 0, stage, torch.device("cpu"), program, job)
    return PipelineTraining(place, neighbours, Recorder(None, stage, stage, 0, 1, 0), None), neighbours


def segment(inputs: Tensor, targets: Tensor) -> Segment:
    data = TensorDataset(inputs, targets)
    return Segment(0, Batches(data, minibatch_sizes(data, BATCH, dynamic=True, training=True), 0, 0))
