"""Traced jobs by real workers, against one process: tensors of every kind, losses with state, hooks, rates by stage."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import feature_workers
import pytest
import state_jobs
import torch
from data_parallel_runs import OneProcess
from extents import slow_but_for
from feature_workers import SAMPLES, cut_before, run, traced, trained
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from toy_workers import stage_contents, write_plan

from pipeplan_launch import Data, Job, export, load_job
from pipeplan_launch.checkpoint.checkpoint import complete_checkpoints
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.runtime import stage_setup

torch.set_num_threads(1)
CPU = torch.device("cpu")
assert SAMPLES == state_jobs.SAMPLES


def reference(name: str) -> str:
    return f"{(feature_workers if hasattr(feature_workers, name) else state_jobs).__file__}:{name}"


SINGLE, EXACT, ROUNDED = (1e-6, 1e-7), (0.0, 0.0), (1e-10, 1e-12)
CASES: list[Any] = [
    ("everything", ("stem", "late"), [1, 1, 1], 1, SINGLE, {}, ()),
    ("closure", ("last",), [1, 1], 1, EXACT, {}, ()),
    # Hooks on parameters get the mean gradient; clipping comes after them, with the norm of complex gradients too.
    ("waves", ("mix",), [2, 1], 2, ROUNDED, {}, ()),
    ("half", ("middle", "norm"), [2, 1, 1], 1, SINGLE, {"recompute": [True] * 3}, ()),
    ("everything", ("head",), [1, 2], 1, SINGLE, {"recompute": [True] * 2}, ()),
    *((name, ("last",), [1, 1], 1, EXACT, {}, ()) for name in state_jobs.LOSSES if name != "closure"),
    ("waves", ("mix",), [1, 2], 2, ROUNDED, {}, ()),
    ("waves_adam", ("mix",), [2, 1], 2, ROUNDED, {}, ("--shard-optimizer",)),
]
"""Job, cuts, replicas, minibatches of an update, tolerance, and what else the plan and the command say."""


@pytest.mark.parametrize("case", slow_but_for(CASES[:3], CASES), ids=lambda case: f"{case[0]}-{case[2]}")
def test_training_is_that_of_one_process(tmp_path: Path, case: Any) -> None:
    """With a flush after every update; the last minibatch has two samples of four."""
    name, cuts, replicas, accumulate, (relative, absolute), plan, options = case
    stages, epochs = cut_before(traced(reference(name)), *cuts), 3 - accumulate
    plan = plan | {"schedule": "1f1b-flush", "accumulate": accumulate}
    folder = run(tmp_path, reference(name), stages, replicas, "--epochs", str(epochs), *options, **plan)
    one_process = OneProcess(load_job(reference(name), 0), replicas[-1], accumulate)
    expected, ours = one_process.train(epochs), trained(folder)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=relative, atol=absolute, msg=lambda m, k=key: f"{k}: {m}")
    last, found = json.loads((folder / "summary.json").read_text())["epochs"][-1], one_process.epochs[-1]
    assert last["test_loss"] == pytest.approx(found["test_loss"], rel=max(relative, 1e-12))
    if one_process.job.metrics:
        assert last["test_accuracy"] == found["correct"] / SAMPLES
        assert last["test_metrics"] == pytest.approx({one: found[one] for one in one_process.job.metrics}, rel=1e-5)
        assert 0 < found["sure"] < 1


@pytest.mark.parametrize("recompute", slow_but_for([False], [False, True]))
def test_a_loss_with_state_resumes_and_is_exported(tmp_path: Path, recompute: bool) -> None:
    """Two replicas of the loss, whose gradients and buffers are averaged; a second pass leaves the buffers alone."""
    ref, plan = reference("module"), {"recompute": [recompute] * 2}
    options = ["--epochs", "2", "--checkpoint-minibatches", "2"]
    stages = cut_before(traced(ref), "last")
    whole = run(tmp_path / "whole", ref, stages, [1, 2], *options, **plan)
    middle = complete_checkpoints(whole)[-2]
    part = run(tmp_path / "part", ref, stages, [1, 2], *options, "--resume-from", str(middle), **plan)
    ours, theirs = trained(part), trained(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert int(theirs["loss.calls"]) == 4, "each replica has run half of eight minibatches"
    model, loss = tmp_path / "model.pt", tmp_path / "loss.pt"
    assert export.main([str(whole), "-o", str(model)]) == export.main([str(whole), "-o", str(loss), "--loss"]) == 0
    state_jobs.Net().double().load_state_dict(torch.load(model, weights_only=True))
    centres = state_jobs.Centres()
    centres.load_state_dict(torch.load(loss, weights_only=True))
    assert torch.equal(centres.centres, theirs["loss.centres"])


MADE: list[weakref.ref[nn.Module | nn.Parameter]] = []


def build() -> Job:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    MADE[:] = [weakref.ref(part) for part in (net, net[0], net[2], *net[0].parameters(), *net[2].parameters())]
    return Job(net, inputs=lambda n: torch.randn(n, 4), loss=functional.mse_loss)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchPlan:
    contents: list[dict[str, Any]] = stage_contents([1, 1])
    for content, layers in zip(contents, (["0", "1", "2"], ["3", "loss"]), strict=True):
        content |= {"layers": layers, "model": {"ref": "test_traced_jobs:build", "graph_hash": None}}
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return load_plan(write_plan(tmp_path, contents))


def build_small() -> Job:
    data = TensorDataset(torch.zeros(5, 4), torch.zeros(5, 2))
    return Job(nn.Linear(4, 2), loss=functional.mse_loss, data=lambda: Data(data))


def test_what_does_not_fit_the_plan_is_refused(plan: LaunchPlan) -> None:
    small = replace(plan, model_ref="test_traced_jobs:build_small", minibatch=10**7)
    for wrong, says in (
        (small, r"minibatch of 10000000 is larger than the job's training data \(5 samples"),
        (replace(plan, graph_hash="sha256:of-another-model"), "profile and solve again"),
    ):
        with pytest.raises(LaunchError, match=says):
            stage_setup.load_stages(wrong, [0], 0, CPU)


def test_the_rest_of_the_model_is_gone(plan: LaunchPlan) -> None:
    job, (program,), graph_hash, dynamic = stage_setup.load_stages(plan, [1], 0, CPU)
    assert set(program.parameters_by_name()) == {"3.weight", "3.bias"}
    gc.collect()
    import test_traced_jobs  # the copy that the reference names, which need not be this very module

    assert len(test_traced_jobs.MADE) == 7
    assert all(made() is None for made in test_traced_jobs.MADE)
    assert dynamic
    assert graph_hash.startswith("sha256:")
    assert not list(job.model.parameters())


def test_every_worker_builds_the_same_weights(plan: LaunchPlan) -> None:
    one, other, seeded = (stage_setup.load_stages(plan, [0], seed, CPU)[1][0] for seed in (3, 3, 4))
    weights = [program.parameters_by_name()["0.weight"] for program in (one, other, seeded)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
