"""Parameters after asynchronous training equal a single process that applies the staleness formula literally.

The reference keeps an explicit copy of every version of every stage's weights and shares no code with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
from pipeplan_launch.job.seeds import mix_seed, seed_forward

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


@pytest.mark.parametrize(
    "optimizer", [name if name == "sgd-fused" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1], [1, 2], [2, 1, 1]], ids=str)
def test_equals_the_formula(tmp_path: Path, replicas: list[int], optimizer: str) -> None:
    toy = Toy(optimizer, samples=2 * 20 * max(replicas))  # 20 updates at the widest stage, more at the others
    run = train(tmp_path, toy, replicas, "--epochs", "1")
    weights, buffers = train_literally(toy, replicas, epochs=1)
    ours = trained(run)
    assert_close(ours[0], weights)
    assert_close(ours[1], buffers)
    start = {name: weight for layer in initial() for name, weight in layer.items()}
    assert all(not torch.equal(weight, start[name]) for name, weight in ours[0].items() if name != "two.unused")


@pytest.mark.parametrize(
    ("replicas", "count", "dynamic"),
    [([3, 2, 1], 25, True), ([1, 2, 3], 25, False), ([3], 8, True), ([2, 2], 3, True), ([3, 1], 2, True)],
    ids=str,
)
def test_any_number_of_minibatches(tmp_path: Path, replicas: list[int], count: int, dynamic: bool) -> None:
    """Short last groups, short last minibatches, fewer minibatches than replicas; two epochs, an idle worker."""
    toy = Toy("sgd-fused", samples=count, dynamic=dynamic)
    run = train(tmp_path, toy, replicas, "--epochs", "2", idle=1)
    weights, buffers = train_literally(toy, replicas, epochs=2)
    ours = trained(run)
    assert_close(ours[0], weights)
    assert_close(ours[1], buffers)


@pytest.mark.parametrize(
    ("schedule", "accumulate"), [("vertical-sync", None), ("2bw", 6), ("gpipe", 4), ("1f1b-flush", 4)]
)
@pytest.mark.parametrize("replicas", [pytest.param([1, 1, 1], marks=pytest.mark.slow), [2, 1]], ids=str)
def test_other_schedules_equal_their_formulas(
    tmp_path: Path, schedule: str, accumulate: int | None, replicas: list[int]
) -> None:
    """A short last minibatch and, where updates accumulate, a short last group."""
    toy = Toy("sgd-fused", samples=61)
    run = train(tmp_path, toy, replicas, "--epochs", "2", schedule=schedule, accumulate=accumulate)
    weights, buffers = train_literally(toy, replicas, 2, schedule=schedule, accumulate=accumulate)
    ours = trained(run)
    assert_close(ours[0], weights)
    assert_close(ours[1], buffers)


@pytest.mark.parametrize("workers", [[[0, 2], [1, 3]], [[3, 1], [4, 0]]], ids=["copies", "anyhow"])
def test_it_does_not_matter_which_workers(tmp_path: Path, workers: list[list[int]]) -> None:
    """Copies of a pipeline on either server, whose replicas lie apart; and no order at all, one worker idle."""
    toy, contents = Toy("sgd", samples=21), stage_contents([2, 2])
    for content in contents:
        content["pipeline"] = [
            stage | {"workers": chosen} for stage, chosen in zip(content["pipeline"], workers, strict=True)
        ]
        content["servers"], content["workers_per_server"] = 1, 5
    folder = write_plan(tmp_path, contents)
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), "--epochs", "2"], toy, 5)
    assert ended.statuses == [0] * 5, ended.err
    for ours, theirs in zip(trained(folder / "run"), train_literally(toy, [2, 2], 2), strict=True):
        assert_close(ours, theirs)


def test_deeper_than_needed_is_staler(tmp_path: Path) -> None:
    """The depth in the plan decides, not what the schedule would need."""
    toy = Toy("sgd", samples=20)
    one = trained(train(tmp_path / "a", toy, [1, 1], "--epochs", "1", depth=[2, 1]))[0]
    other = trained(train(tmp_path / "b", toy, [1, 1], "--epochs", "1", depth=[4, 1]))[0]
    assert not torch.allclose(one["one.weight"], other["one.weight"])


def test_a_resumed_run_keeps_its_epochs_and_a_finished_one_its_files(tmp_path: Path) -> None:
    toy = Toy("sgd", samples=9)
    run = train(tmp_path, toy, [1, 1], "--epochs", "1")
    first = json.loads((run / "summary.json").read_text())["epochs"]
    train(tmp_path, toy, [1, 1], "--epochs", "2", "--resume")
    both = json.loads((run / "summary.json").read_text())["epochs"]
    assert [epoch["epoch"] for epoch in both] == [1, 2]
    assert both[:1] == first
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    ended = run_plan(tmp_path, ["--run-dir", str(run), "--epochs", "2", "--resume"], toy, 2)
    assert ended.statuses == [0, 0]
    assert ended.err.startswith("nothing left to do: ")
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


def literal_score(weights: State, buffers: State, toy: Toy) -> tuple[int, float]:
    inputs, targets = samples(toy.samples + 23)
    inputs, targets = inputs[toy.samples :], targets[toy.samples :]
    given: tuple[Tensor, ...] = (inputs,)
    for layer in range(3):
        given = run_layer(layer, weights, buffers, given, False)
    return int((given[0].argmax(1) == targets).sum()), functional.cross_entropy(given[0], targets).item()


@pytest.mark.parametrize(("replicas", "dynamic"), [([2, 1], True), ([1, 2, 2], False)], ids=str)
def test_evaluation_counts_as_one_process_does(tmp_path: Path, replicas: list[int], dynamic: bool) -> None:
    """23 test samples in minibatches of 4: the last is short, or filled up and the filling not counted."""
    toy = Toy(dynamic=dynamic)
    run = train(tmp_path, toy, replicas, "--epochs", "1", minibatch=4)
    correct, loss = literal_score(*trained(run), toy)
    epoch = json.loads((run / "summary.json").read_text())["epochs"][-1]
    assert epoch["test_accuracy"] == correct / 23
    assert epoch["test_loss"] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1], [3]], ids=str)
def test_inference_counts_as_one_process_does(tmp_path: Path, replicas: list[int]) -> None:
    toy = Toy()
    run = train(tmp_path / "train", toy, [2, 1], "--epochs", "1")
    correct, _ = literal_score(*trained(run), toy)
    folder = tmp_path / "infer"
    write_plan(folder, stage_contents(replicas, mode="inference", minibatch=4))
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), "--weights", str(run)], toy, sum(replicas))
    assert ended.statuses == [0] * sum(replicas), ended.err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["correct"], summary["samples"]) == (correct, 23)
    assert f"({correct} of 23)" in ended.out
