"""A job: what pipeplan needs to know of a training. It runs as it is; put your own model and data in its place.

    pipeplan profile job.py:build

Every worker calls `build` with the same random seed, and keeps only its own stage of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job


class Block(nn.Module):
    """A residual block. Members of a list of modules, as here, are what plans move around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Net(nn.Module):
    """Your model goes here, as it is: any nn.Module whose forward() can be traced (docs/models.md)."""

    def __init__(self, width: int = 128, blocks: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def spirals() -> Data:
    """Your data goes here: map-style data sets of pairs (input, target), without the DataLoader."""
    fixed = torch.Generator().manual_seed(0)  # the data must be the same for every worker
    arm = torch.randint(3, (5120,), generator=fixed)
    along = torch.rand(5120, generator=fixed)
    angle = 4 * along + 2.1 * arm + 0.2 * torch.randn(5120, generator=fixed)
    points = torch.stack((along * angle.cos(), along * angle.sin()), dim=1)
    return Data(train=TensorDataset(points[:4096], arm[:4096]), test=TensorDataset(points[4096:], arm[4096:]))


def build() -> Job:
    """What trains: a reference to it is file.py:build."""
    return Job(
        model=Net(),
        loss=nn.functional.cross_entropy,  # loss(output, target), the mean over the minibatch
        data=spirals,  # called by each worker that reads data
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        minibatch=64,  # samples that go through the pipeline as one piece
        # scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10),
        # clip_norm=1.0,
        # autocast=torch.bfloat16,
    )
