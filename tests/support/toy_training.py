"""The toy of `toy_workers`, trained by real workers, and in one process that applies the staleness formula literally.

The latter keeps an explicit copy of every version of every stage's weights and shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from toy_workers import (
    OPTIMIZERS,
    Toy,
    depths,
    initial,
    initial_buffers,
    run_layer,
    run_plan,
    samples,
    split_layers,
    stage_contents,
    write_plan,
)

from pipeplan_launch.checkpoint import tensor_store
from pipeplan_launch.checkpoint.checkpoint import latest_checkpoint
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX
from pipeplan_launch.job.pass_conditions import mix_seed, seed_forward

State = dict[str, Tensor]


class ReferenceStage:
    """Explicit copies: `versions[v]` are the weights after v updates."""

    def __init__(self, layers: list[int], replicas: int, optimizer: str) -> None:
        self.layers, self.replicas = layers, replicas
        self.live = {n: torch.nn.Parameter(w) for layer in layers for n, w in initial()[layer].items()}
        self.optimizer = OPTIMIZERS[optimizer](list(self.live.values()))
        self.versions = [self.copy()]
        self.gradients: list[tuple[int, State]] = []
        self.buffers = [
            {n: b for layer in layers for n, b in initial_buffers()[layer].items()} for _ in range(replicas)
        ]

    def copy(self) -> State:
        return {name: weight.detach().clone() for name, weight in self.live.items()}

    def weights_after(self, version: int) -> State:
        return {name: weight.clone().requires_grad_() for name, weight in self.versions[version].items()}

    def update(self, group: list[tuple[int, State]]) -> None:
        """`group`: samples and gradients of each of its minibatches."""
        for name, weight in self.live.items():
            given = [samples * gradients[name] for samples, gradients in group if name in gradients]
            weight.grad = sum(given[1:], given[0]) / sum(samples for samples, _ in group) if given else None
        self.optimizer.step()
        self.versions.append(self.copy())


def stashed(replicas: list[int], stage: int, minibatch: int) -> int:
    """Weight stashing; a replicated stage of several updates one minibatch late."""
    late = int(len(replicas) > 1 and replicas[stage] > 1)
    return max(0, minibatch // replicas[stage] - depths(replicas)[stage] + 1 - late)


VERSIONS: dict[str, Callable[[list[int], int, int, int], int]] = {
    "1f1b-stashing": lambda replicas, _, stage, minibatch: stashed(replicas, stage, minibatch),
    "vertical-sync": lambda r, _, stage, minibatch: stashed(r, 0, minibatch) * r[0] // r[stage],
    "2bw": lambda _replicas, size, _stage, minibatch: max(0, minibatch // size - 1),
    "gpipe": lambda _replicas, size, _stage, minibatch: minibatch // size,
    "1f1b-flush": lambda _replicas, size, _stage, minibatch: minibatch // size,
    "zb-h1": lambda _replicas, size, _stage, minibatch: minibatch // size,
}
"""(replicas, minibatches per update, stage, minibatch) -> updates behind its weights."""


def train_literally(
    toy: Toy,
    replicas: list[int],
    epochs: int,
    minibatch: int = 2,
    schedule: str = "1f1b-stashing",
    accumulate: int | None = None,
) -> tuple[State, State]:
    """(weights, buffers) after the epochs, by the formula."""
    stages = [ReferenceStage(*each, toy.optimizer) for each in zip(split_layers(len(replicas)), replicas, strict=True)]
    inputs, targets = samples(toy.samples + 23)
    for epoch in range(epochs):
        begun = [len(stage.versions) - 1 for stage in stages]
        order = torch.randperm(toy.samples, generator=torch.Generator().manual_seed(mix_seed("order", 0, epoch)))
        chunks = [chunk for chunk in order.split(minibatch) if toy.dynamic or len(chunk) == minibatch]
        for number, chunk in enumerate(chunks):
            versions = [VERSIONS[schedule](replicas, accumulate or 1, s, number) for s in range(len(stages))]
            weights = [stage.weights_after(begun[s] + versions[s]) for s, stage in enumerate(stages)]
            given: tuple[Tensor, ...] = (inputs[chunk],)
            for s, stage in enumerate(stages):
                seed_forward(0, epoch, number, s)
                for layer in stage.layers:
                    given = run_layer(layer, weights[s], stage.buffers[number % stage.replicas], given, True)
            functional.cross_entropy(given[0], targets[chunk]).backward()
            for s, stage in enumerate(stages):
                stage.gradients.append((len(chunk), {n: w.grad for n, w in weights[s].items() if w.grad is not None}))
                if len(stage.gradients) == (accumulate or stage.replicas) or number == len(chunks) - 1:
                    stage.update(stage.gradients)
                    stage.gradients = []
        for stage in stages:
            agree(stage.buffers)
    return (
        {name: weight for stage in stages for name, weight in stage.copy().items()},
        {name: buffer for stage in stages for name, buffer in stage.buffers[0].items()},
    )


def agree(replicas: list[State]) -> None:
    for name in replicas[0]:
        values = torch.stack([buffers[name] for buffers in replicas])
        together = values.mean(0) if values.is_floating_point() else values.amax(0)
        for buffers in replicas:
            buffers[name] = together.clone()


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
