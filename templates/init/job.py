"""A training job for pipeplan. It runs as it is: replace the model and the data by your own.

    pipeplan profile job.py:build

Every worker calls `build` with the same random seed and keeps only its own stage of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job


class Block(nn.Module):
    """A residual block. Plans assign the members of a list of modules, such as these blocks, to stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Net(nn.Module):
    """Put your model here, without changes: any nn.Module whose forward() can be traced (docs/models.md)."""

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
    """Put your data here: map-style data sets of pairs (input, target), without a DataLoader."""
    fixed = torch.Generator().manual_seed(0)  # every worker must see the same data
    arm = torch.randint(3, (17408,), generator=fixed)
    along = torch.rand(17408, generator=fixed)
    angle = 4 * along + 2.1 * arm + 0.2 * torch.randn(17408, generator=fixed)
    points = torch.stack((along * angle.cos(), along * angle.sin()), dim=1)
    return Data(train=TensorDataset(points[:16384], arm[:16384]), test=TensorDataset(points[16384:], arm[16384:]))


def build() -> Job:
    """Build the job. `pipeplan profile` takes a reference to this function, file.py:build."""
    return Job(
        model=Net(),
        loss=nn.functional.cross_entropy,  # loss(output, target), the mean over the minibatch
        data=spirals,  # called by each worker that reads data
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        minibatch=16,  # samples that go through the pipeline as one piece
        # scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10),
        # clip_norm=1.0,
        # autocast=torch.bfloat16,
    )
