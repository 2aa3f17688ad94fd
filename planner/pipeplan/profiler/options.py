"""How to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all (0: not known), and what comes next."""


@dataclass(frozen=True)
class Options:
    """How to measure."""

    batches: tuple[int, ...] = ()
    """Samples in a minibatch: the size of the profile, and others to measure in the same run; the job's own by default.
    """
    device: str = "cpu"
    threads: int = 1
    """Threads that torch computes with on the CPU."""
    repeats: int | None = None
    """Measured passes; by default as many as make the spread small."""
    warmup: int = 2
    """Passes before those; one is enough where they are long."""
    seed: int = 0
    granularity: str = "layer"
    """What one layer is: `module`, `layer` or `op`."""
    processes: int = 1
    """How many processes measure at the same time."""
    measure_all: bool = False
    """Measure each layer, also where several are the same computation."""

    @property
    def minibatch(self) -> int | None:
        """The size of the profile, if one was given."""
        return self.batches[0] if self.batches else None
