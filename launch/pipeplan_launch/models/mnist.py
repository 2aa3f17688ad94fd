"""A small convolutional network for digits, trained on the 1,797 scanned digits that scikit-learn ships."""

from __future__ import annotations

import csv
import gzip
import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Data, Job

TRAIN_SAMPLES = 1437
SPLIT_SEED = 0


class DigitsNet(nn.Module):
    """Two convolutions that halve the size (28 → 14 → 7), two hidden linear layers and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, stride=2, padding=2)
        self.fc1 = nn.Linear(32 * 7 * 7, 200)
        self.fc2 = nn.Linear(200, 200)
        self.out = nn.Linear(200, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores for images of 1×28×28."""
        x = functional.relu(self.conv1(image))
        x = functional.relu(self.conv2(x))
        x = functional.relu(self.fc1(x.flatten(1)))
        x = functional.relu(self.fc2(x))
        scores: Tensor = self.out(x)
        return scores


def digits() -> Data:
    """The digits, resized from 8×8 to 28×28 and scaled to [0, 1], with a fixed random split into 1437 and 360
    samples.
    """
    scans, labels = load_scans()
    small = scans.unsqueeze(1) / 16
    images = functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, test = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    return Data(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]))


def load_scans() -> tuple[Tensor, Tensor]:
    """(float32 images of 8×8 with values from 0 to 16, int64 labels).

    It reads the file of scikit-learn's `load_digits` itself, because importing scikit-learn takes almost a second in
    every worker.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise LaunchError(
            "the bundled digits need scikit-learn: install pipeplan[examples], or pip install scikit-learn"
        )
    file = Path(spec.origin or "").parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        with gzip.open(file, "rt", encoding="ascii") as lines:
            rows = torch.tensor([[float(value) for value in row] for row in csv.reader(lines)])
        return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].long()
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.as_tensor(bunch.images, dtype=torch.float32), torch.as_tensor(bunch.target, dtype=torch.int64)


def build() -> Job:
    """The job with cross entropy and Adam. It reaches 97% accuracy with updates that average 1 or 3 minibatches."""
    return Job(
        DigitsNet(),
        inputs=lambda n: torch.rand(n, 1, 28, 28),
        loss=functional.cross_entropy,
        data=digits,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        name="mnist",
        minibatch=32,
    )
