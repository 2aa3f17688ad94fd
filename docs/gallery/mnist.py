"""Digits: two convolutions with most of the work, two linear layers with nearly all of the weights.

`pipeplan profile mnist.py:job` measures it.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

TRAIN = 1437


class Net(nn.Module):
    """Maps 28×28 pixels to ten scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.drop1 = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(32 * 12 * 12, 256)
        self.drop2 = nn.Dropout(0.2)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.relu(self.conv1(image))
        x = functional.relu(self.conv2(x))
        x = self.drop1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.drop2(functional.relu(self.fc1(x)))
        return self.fc2(x)


def digits() -> Data:
    """The 1,797 scanned digits of scikit-learn, enlarged from 8×8 to the 28×28 of MNIST."""
    scans = load_digits()
    small = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16
    images = functional.interpolate(small, size=(28, 28), mode="bilinear")
    labels = torch.tensor(scans.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    return Data(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]))


def job() -> Job:
    return Job(
        model=Net(),
        loss=functional.cross_entropy,
        data=digits,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        name="mnist-net",
        minibatch=32,
    )
