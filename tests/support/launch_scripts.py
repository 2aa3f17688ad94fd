"""launch.sh, rendered for the plan of a test, and jobs for it to train."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toy_workers import stage_contents, write_plan

from pipeplan.rendering.templates import load_template


def render(folder: Path, **variables: Any) -> Path:
    """Render launch.sh of a made-up plan into the folder of its stage files."""
    values = {"title": "a plan", "servers": 1, "workers_per_server": 2, "device": "cpu", "python": sys.executable}
    values |= {
        "server_sizes": (),
        "server_list": (),
        "idle_servers": 0,
        "uneven": False,
        "threads": 1,
        "version": "0",
        "command": "a test",
        "updates": "",
        "folder": "",
    }
    script = folder / "launch.sh"
    script.write_text(load_template("launch.sh.j2").render(values | variables))
    script.chmod(0o755)
    return script


LAYERS = {1: [["0", "1", "2", "loss"]], 2: [["0", "1"], ["2", "loss"]], 3: [["0"], ["1"], ["2", "loss"]]}
"""Of the jobs below, by the number of stages."""


def script_of(folder: Path, job: str, replicas: Sequence[int] = (1, 1), **changed: Any) -> Path:
    """launch.sh of a plan for a job, in a folder that has both; `changed` replaces fields of the stage files."""
    (folder / "job.py").write_text(job)
    contents = stage_contents(replicas, minibatch=4, mode=changed.get("mode", "training"))
    for content, layers in zip(contents, LAYERS[len(replicas)], strict=True):
        content |= {"model": {"ref": f"{folder / 'job.py'}:job", "graph_hash": None}, "layers": layers} | changed
    servers, each = changed.get("servers", 1), changed.get("workers_per_server", sum(replicas))
    return render(write_plan(folder / "plan", contents), servers=servers, workers_per_server=each)


JOB = """
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from pipeplan_launch import Data, Job

def job():
    data = TensorDataset(torch.randn(12, 4), torch.randint(3, (12,)))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return Job(net, loss=functional.cross_entropy, data=lambda: Data(data, data))
"""


SLOW_JOB = """
import time
import torch
from torch.nn import functional
from torch.utils.data import Dataset
from pipeplan_launch import Data, Job

class Slow(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), index % 3

def job():
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return Job(net, loss=functional.cross_entropy, data=lambda: Data(Slow()), optimizer=optimizer)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
