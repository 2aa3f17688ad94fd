"""The needs of training that a job may lack: a loss, and data with targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

TrainingNeed = Literal["loss", "data"]
"""A field of a job that training needs, and profiling and planning do not."""


def lacking_text(lacks: Sequence[TrainingNeed]) -> str:
    """The consequence of what a job lacks, in one line for people."""
    missing = " and ".join(f"no {name}" for name in lacks)
    fields = ", ".join(f"{name}=..." for name in lacks)
    return (
        f"the job has {missing}, so that it can be planned, but launch.sh cannot train it: return Job(model, {fields}) "
        "and profile it again"
    )
