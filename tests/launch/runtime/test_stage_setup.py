"""A worker builds the whole model and keeps its own stage of it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from toy_workers import stage_contents, write_plan

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.runtime import stage_setup

MADE: list[weakref.ref[nn.Module | nn.Parameter]] = []
CPU = torch.device("cpu")


def build() -> Job:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    MADE[:] = [weakref.ref(part) for part in (net, net[0], net[2], *net[0].parameters(), *net[2].parameters())]
    return Job(net, inputs=lambda n: torch.randn(n, 4), loss=functional.mse_loss)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchPlan:
    contents: list[dict[str, Any]] = stage_contents([1, 1])
    for content, layers in zip(contents, (["0", "1", "2"], ["3", "loss"]), strict=True):
        content |= {"layers": layers, "model": {"ref": "test_stage_setup:build", "graph_hash": None}}
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return load_plan(write_plan(tmp_path, contents))


def build_small() -> Job:
    data = TensorDataset(torch.zeros(5, 4), torch.zeros(5, 2))
    return Job(nn.Linear(4, 2), loss=functional.mse_loss, data=lambda: Data(data))


def test_what_does_not_fit_the_plan_is_refused(plan: LaunchPlan) -> None:
    small = replace(plan, model_ref="test_stage_setup:build_small", minibatch=10**7)
    for wrong, says in (
        (small, r"minibatch of 10000000 is larger than the job's training data \(5 samples"),
        (replace(plan, graph_hash="sha256:of-another-model"), "profile and solve again"),
    ):
        with pytest.raises(LaunchError, match=says):
            stage_setup.load_stages(wrong, [0], 0, CPU)


def test_the_rest_of_the_model_is_gone(plan: LaunchPlan) -> None:
    job, (program,), graph_hash, dynamic = stage_setup.load_stages(plan, [1], 0, torch.device("cpu"))
    assert set(program.parameters_by_name()) == {"3.weight", "3.bias"}
    gc.collect()
    import test_stage_setup  # the copy that the reference names, which need not be this very module

    assert len(test_stage_setup.MADE) == 7
    assert all(made() is None for made in test_stage_setup.MADE)
    assert dynamic
    assert graph_hash.startswith("sha256:")
    assert not list(job.model.parameters())


def test_every_worker_builds_the_same_weights(plan: LaunchPlan) -> None:
    one, other, seeded = (stage_setup.load_stages(plan, [0], seed, CPU)[1][0] for seed in (3, 3, 4))
    weights = [program.parameters_by_name()["0.weight"] for program in (one, other, seeded)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
