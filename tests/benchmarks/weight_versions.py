"""What an update costs where older weights are kept: in place, with a copy of the weights, and handed over.

    python tests/benchmarks/weight_versions.py [--updates 30]

The parameters are 8 matrices of 1024×1024, float32. Every figure is CPU time of one thread per update, the least of
all. "In place" keeps no older weights, and is the least that an update can cost. What cannot be handed over is copied.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.runtime.weight_stash import WeightVersions

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=1e-3, foreach=False),
    "SGD, momentum": lambda p: SGD(p, lr=1e-3, momentum=0.9, foreach=False),
    "SGD, momentum, foreach": lambda p: SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "AdamW": lambda p: AdamW(p, lr=1e-3, foreach=False),
    "AdamW, foreach": lambda p: AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, lr=1e-3, fused=True),
    "NAdam": lambda p: NAdam(p, lr=1e-3, foreach=False),
}
WAYS = ("in place", "copied", "handed over")
DEPTH = 2
"""Minibatches in flight."""


class Updates:
    """Updates of one optimiser in one way."""

    def __init__(self, way: str, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(8)]
        self.versions = WeightVersions({str(number): one for number, one in enumerate(self.parameters)})
        self.optimizer = make(self.parameters)
        self.depth = 1 if way == "in place" else DEPTH
        self.hand_over = way == "handed over"
        self.made = 0
        self.cpu_s: list[float] = []
        for minibatch in range(self.depth - 1):
            self.versions.acquire(minibatch)

    def _step(self) -> None:
        if self.hand_over:
            with self.versions.handing_over():
                self.optimizer.step()
        else:
            self.optimizer.step()

    def make(self) -> None:
        """The next update."""
        self.versions.acquire(self.made + self.depth - 1)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.01)
        self.versions.release(self.made)
        before = time.process_time()
        self.versions.update(self.parameters, self._step, hand_over=self.hand_over)
        self.cpu_s.append(time.process_time() - before)
        self.made += 1


def main() -> None:
    """Measure all ways by turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    table = Table(title="CPU ms per update of 8.4 M parameters", title_justify="left")
    for heading in ("optimiser", *WAYS):
        table.add_column(heading, justify="right")
    for name, optimizer in OPTIMIZERS.items():
        all_ways = [Updates(way, optimizer) for way in WAYS]
        for _ in range(given.updates):
            for updates in all_ways:
                updates.make()
        in_place, copied, handed = (1e3 * min(updates.cpu_s[3:]) for updates in all_ways)
        table.add_row(name, *(f"{one:.1f}" for one in (in_place, copied, handed)))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
