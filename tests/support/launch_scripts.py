"""launch.sh, rendered for the plan of a test, and jobs for it to train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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
