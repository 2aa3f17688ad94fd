"""The needs of training that a job may lack: a loss, and data with targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

TrainingNeed = Literal["loss", "data"]
"""A field of a job that training needs, and profiling and planning do not."""


LEFT_OUT = "--no-self-check"
"""The reason why a profile was not self-checked, where the option left it out."""


def unchecked_text(reason: str) -> str:
    """One line for the user of a profile whose model was not compared with plain training."""
    return f"not self-checked, whether stages train as the model alone does ({reason}); launch.sh checks it by itself"


def lacking_text(lacks: Sequence[TrainingNeed]) -> str:
    """The consequence of what a job lacks, in one line for people."""
    missing = " and ".join(f"no {name}" for name in lacks)
    fields = ", ".join(f"{name}=..." for name in lacks)
    return (
        f"the job has {missing}, so that it can be planned, but launch.sh cannot train it: return Job(model, {fields}) "
        "and profile it again"
    )
