"""Real runs whose bottleneck was put there by sleeping: the table, its first cause, and the loop through calibrate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SLEEP_S = 0.05
JOB = """
import time
import torch
from torch.nn import functional
from torch.utils.data import Dataset
from pipeplan_launch import Data, Job

class Samples(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep({reading} / 4)
        return torch.randn(64), index % 3

def loss(output, target):
    time.sleep({loss})
    return functional.cross_entropy(output, target)

def job():
    inner = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    net = torch.nn.Sequential(*inner, torch.nn.Linear(64, 3))
    return Job(net, loss=loss, data=lambda: Data(Samples(), Samples()), minibatch=4)
"""


def pipeplan(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan", *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def launch(folder: Path, plan: str, run: str) -> tuple[dict[str, Any], str]:
    """The summary, and what was printed."""
    command = [f"./{plan}/launch.sh", "--epochs", "2", "--evaluate-every", "2", "--run-dir", f"{plan}/runs/{run}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / plan / "runs" / run / "summary.json").read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "kind", "stage"), [("reading", "reading of samples", 0), ("loss", "forward", 1)], ids=["reading", "loss"]
)
def test_the_loop_finds_what_sleeps_and_predicts_it(tmp_path: Path, where: str, kind: str, stage: int) -> None:
    """Sleeping takes no time of a processor, so that the profile knows nothing of it; the second prediction does."""
    (tmp_path / "job.py").write_text(JOB.format(**({"reading": 0, "loss": 0} | {where: SLEEP_S})))
    pipeplan(tmp_path, "profile", "job.py:job", "--repeats", "3", "-o", "profile.json")
    shape = ("--stages", "2", "--straight")
    pipeplan(tmp_path, "solve", "profile.json", "--cluster", "local", "--workers", "2", *shape)
    summary, table = launch(tmp_path, "plan", "first")
    assert summary["minibatch_s"]["measured"] > SLEEP_S
    assert summary["cause"]["kind"] == kind
    assert summary["cause"]["explains"] > 0.5
    if kind == "forward":
        assert summary["cause"]["stage"] == stage
    assert f"first cause: {summary['cause']['text']}" in table
    assert "waiting" in table.splitlines()[1]
    pipeplan(tmp_path, "calibrate", "plan", "--profile", "profile.json")
    pipeplan(tmp_path, "solve", "calibrated.json", "--cluster", "calibrated.toml", *shape, "-o", "plan-2")
    again, _ = launch(tmp_path, "plan-2", "second")
    assert again["profile"] == "calibrated"
    assert 0.7 < again["minibatch_s"]["ratio"] < 1.4
