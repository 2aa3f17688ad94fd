"""The options of a measurement or an estimate, the smaller sizes to measure, and a check for torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.profile_data.rescale import halved
from pipeplan_launch.torch_check import TRACING, import_problem

Progress = Callable[[int, int, str], None]
"""Called with (steps done, total number of steps (0: unknown), name of the next step)."""


@dataclass(frozen=True)
class ProfilerOptions:
    """The options by which a model is traced and measured, or estimated."""

    batches: tuple[int, ...] = ()
    """Minibatch sizes in samples: the profile's size, then further sizes to measure. Empty for the job's own size."""
    halvings: int = 0
    """Number of halvings of the first size that are measured briefly as well."""
    device: str = "cpu"
    """`cpu` or `cuda` to measure here; to estimate, the name of a bundled device or the path of a device file."""
    threads: int = 1
    """Number of threads that torch computes with on the CPU."""
    repeats: int | None = None
    """Number of measured passes; None to go on until the spread is small."""
    warmup: int = 2
    """Number of passes before the measured passes. If passes are long, only one pass is run."""
    seed: int = 0
    granularity: str = "layer"
    """The size of a layer: `module`, `layer` or `op`."""
    load: bool = False
    """Whether times under load are measured too. This needs a CPU with several cores, and one thread."""
    self_check: bool = True
    """Whether to compare training in stages with plain training of the model first."""

    @property
    def minibatch(self) -> int | None:
        """The minibatch size of the profile, if one was given."""
        return self.batches[0] if self.batches else None


def smaller_sizes(sizes: Sequence[int], halvings: int) -> list[int]:
    """The halvings of the first size that are not in `sizes`, largest first."""
    return [size for size in halved(sizes[0], halvings) if size not in sizes]


def check_torch() -> None:
    """Raise an `InputError` that says which torch profiling needs, if torch is missing or unusable."""
    if why := import_problem(TRACING):
        raise InputError(f"profiling needs torch: {why[0]}; {why[1]}")
