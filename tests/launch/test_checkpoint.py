"""Checkpoints are whole or absent, hold no code, and are refused where they do not fit."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from toy_workers import stage_contents, write_plan

from pipeplan_launch import checkpoint, optimizers
from pipeplan_launch.config import LaunchPlan, load_plan
from pipeplan_launch.errors import LaunchError


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    return load_plan(write_plan(tmp_path / "plan", stage_contents([1, 1])))


def save(run: Path, epoch: int, plan: LaunchPlan, value: float = 1.0) -> Path:
    folder = checkpoint.epoch_folder(run, epoch)
    for stage in range(2):
        checkpoint.save_stage(folder, stage, {f"w{stage}": torch.full((3,), value)}, {}, {"state": {}, "groups": []})
    checkpoint.write_manifest(run, epoch, 7, plan, "sha256:toy")
    return folder


def test_the_latest_complete_one_is_found(tmp_path: Path, plan: LaunchPlan) -> None:
    assert checkpoint.latest(tmp_path) is None
    for epoch in (1, 2, 10):
        save(tmp_path, epoch, plan, float(epoch))
    manifest = checkpoint.latest(tmp_path)
    assert manifest is not None
    assert (manifest.epoch, manifest.seed, manifest.layers) == (10, 7, plan.layers)
    assert torch.equal(checkpoint.read_stage(manifest.stage_file(1))["parameters"]["w1"], torch.full((3,), 10.0))
    assert not checkpoint.epoch_folder(tmp_path, 1).exists()
    assert checkpoint.epoch_folder(tmp_path, 2).exists()


def test_an_interrupted_one_leaves_the_one_before(tmp_path: Path, plan: LaunchPlan) -> None:
    """At every point of writing the second, the first is what is found."""
    save(tmp_path, 1, plan)
    folder = save(tmp_path, 2, plan)
    (folder / "manifest.json").unlink()
    for name in ("stage-1.pt", "stage-0.pt"):
        manifest = checkpoint.latest(tmp_path)
        assert manifest is not None
        assert manifest.epoch == 1
        (folder / name).unlink()


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 1, plan)
    before = (folder / "stage-0.pt").read_bytes()

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LaunchError, match=r"stage-0\.pt failed: No space left on device"):
        checkpoint.save_stage(folder, 0, {"w0": torch.zeros(3)}, {}, {})
    assert (folder / "stage-0.pt").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "stage-0.pt", "stage-1.pt"]


def test_damage_is_noticed(tmp_path: Path, plan: LaunchPlan) -> None:
    folder = save(tmp_path, 1, plan)
    whole = (folder / "stage-0.pt").read_bytes()
    (folder / "stage-0.pt").write_bytes(whole[:-1])
    with pytest.raises(LaunchError, match=r"stage-0\.pt is missing or not of the \d+ bytes"):
        checkpoint.latest(tmp_path)
    (folder / "stage-0.pt").write_bytes(bytes(len(whole)))
    with pytest.raises(LaunchError, match="cannot be loaded"):
        checkpoint.read_stage(folder / "stage-0.pt")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(LaunchError, match="cannot be read"):
        checkpoint.latest(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_loading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save({"parameters": Bomb(), "buffers": {}, "optimizer": {}}, buffer)
    for content in (buffer.getvalue(), pickle.dumps(Bomb(), protocol=2)):
        Path("stage-0.pt").write_bytes(content)
        with pytest.raises(LaunchError, match="cannot be loaded"):
            checkpoint.read_stage(Path("stage-0.pt"))
    assert not Path("exploded").exists()


def test_another_model_or_plan_is_refused(tmp_path: Path, plan: LaunchPlan) -> None:
    save(tmp_path, 1, plan)
    manifest = checkpoint.latest(tmp_path)
    assert manifest is not None
    checkpoint.check_fits(manifest, plan, "sha256:toy")
    with pytest.raises(LaunchError, match="of another model"):
        checkpoint.check_fits(manifest, plan, "sha256:other")
    other = load_plan(write_plan(tmp_path / "other", stage_contents([1, 1, 1])))
    with pytest.raises(LaunchError, match="cuts the model otherwise"):
        checkpoint.check_fits(manifest, other, "sha256:toy")


def test_tensors_must_fit() -> None:
    target = {"w": torch.zeros(2)}
    with pytest.raises(LaunchError, match="here has no 'w'"):
        checkpoint.load_tensors(target, {}, "here")
    with pytest.raises(LaunchError, match=r"'w' is \(3,\), the model's is \(2,\)"):
        checkpoint.load_tensors(target, {"w": torch.zeros(3)}, "here")


def weights() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))}


def optimizer_for(kind: str, parameters: dict[str, nn.Parameter]) -> Optimizer:
    if kind == "adamw":
        return AdamW(parameters.values(), lr=0.1, fused=True)
    return SGD([{"params": [parameters["b"]], "lr": 0.5}, {"params": [parameters["a"]]}], lr=0.1, momentum=0.9)


def step(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "sgd-groups"])
def test_an_optimiser_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    ours = weights()
    optimizer = optimizer_for(kind, ours)
    step(optimizer, ours)
    checkpoint.save_stage(tmp_path, 0, ours, {}, optimizers.optimizer_state(optimizer, ours))
    saved = checkpoint.read_stage(tmp_path / "stage-0.pt")
    theirs = weights()
    other = optimizer_for(kind, theirs)
    checkpoint.load_tensors(theirs, saved["parameters"], "there")
    optimizers.load_optimizer(other, theirs, saved["optimizer"], "there")
    step(optimizer, ours)
    step(other, theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_optimiser_that_cannot_be_saved_is_refused() -> None:
    parameters = weights()
    optimizer = SGD(parameters.values(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda: 0
    with pytest.raises(LaunchError, match="'schedule' is a function"):
        optimizers.optimizer_state(optimizer, parameters)


def test_weights_come_from_any_plan(tmp_path: Path, plan: LaunchPlan) -> None:
    save(tmp_path, 1, plan, 4.0)
    manifest = checkpoint.latest(tmp_path)
    assert manifest is not None
    targets: dict[str, Tensor] = {"w1": nn.Parameter(torch.zeros(3)), "w0": nn.Parameter(torch.zeros(3))}
    checkpoint.load_weights(manifest, targets, {})
    assert all(torch.equal(target, torch.full((3,), 4.0)) for target in targets.values())
