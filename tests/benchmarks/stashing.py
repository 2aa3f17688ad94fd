"""How far trained parameters are from the staleness formula applied literally, in one process with a copy per version.

    PYTHONPATH=tests/support python tests/benchmarks/stashing.py

Real worker processes over Gloo, float64, 20 updates and more of a small model with dropout, a tensor relayed over a
stage, integer tensors and running statistics. The difference is relative to each parameter's largest entry.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from toy_training import train, train_literally, trained
from toy_workers import OPTIMIZERS, Toy

PLANS = [[1, 1, 1], [2, 1], [1, 2], [2, 1, 1]]


def furthest(folder: Path, replicas: list[int], optimizer: str) -> float:
    """The largest relative difference of any parameter."""
    toy = Toy(optimizer, samples=2 * 20 * max(replicas))
    ours, _ = trained(train(folder, toy, replicas, "--epochs", "1"))
    theirs, _ = train_literally(toy, replicas, epochs=1)
    return max(float((ours[name] - weight).abs().max() / weight.abs().max()) for name, weight in theirs.items())


def main() -> None:
    """Print a row for every plan and optimiser."""
    torch.set_num_threads(1)
    table = Table("replicas", "optimiser", "largest relative difference", "aim")
    for replicas in PLANS:
        for optimizer in OPTIMIZERS:
            with tempfile.TemporaryDirectory() as folder:
                difference = furthest(Path(folder), replicas, optimizer)
            table.add_row("-".join(map(str, replicas)), optimizer, f"{difference:.1e}", "1e-06")
    Console().print(table)


if __name__ == "__main__":
    main()
