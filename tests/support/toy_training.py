"""The toy of `toy_workers`, trained by real workers, and in one process by the formula (`literal.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import literal
import torch
from schedule_shapes import depths_for
from torch import Tensor, nn
from torch.nn import functional
from toy_features import LIMIT
from toy_workers import (
    OPTIMIZERS,
    Toy,
    initial,
    initial_buffers,
    run_layer,
    run_plan,
    split_layers,
    stage_contents,
    toy_data,
    write_plan,
)

from pipeplan_launch.checkpoint import tensor_store
from pipeplan_launch.checkpoint.checkpoint import latest_checkpoint
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX

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
    manifest = latest_checkpoint(run)
    assert manifest is not None
    found = tensor_store.load_tensors(manifest, [name for name in manifest.tensors if name.startswith(MODEL_PREFIX)])
    state = {name.removeprefix(MODEL_PREFIX): value for name, value in found.items()}
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
    write_plan(folder, stage_contents(replicas, **plan))
    world = sum(replicas) + plan.get("idle", 0)
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), *arguments], toy, world)
    assert ended.statuses == [0] * world, ended.err
    return folder / "run"
