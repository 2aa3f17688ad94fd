"""What the executor itself costs on a device, beside the layers: passes, messages and copies of weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeplan.errors import InputError
from pipeplan.util.numeric_fields import settle_numbers
from pipeplan.util.typed import Amount

LONGEST_S = 3600.0
"""Longest time of one of these costs, in seconds."""


@dataclass(frozen=True)
class ExecutorCosts:
    """What the executor costs, in seconds on a device of speed 1; nothing by default.

    docs/cost-model.md, "The executor's own work", has the formula. Raises an `InputError` where a time is out of range.
    """

    pass_s: Amount = 0.0
    """For each forward and each backward pass of a minibatch through a stage."""
    message_s: Amount = 0.0
    """For each message that a stage sends or receives."""
    message_byte_s: Amount = 0.0
    """For each byte of such a message."""
    version_byte_s: Amount = 0.0
    """For each byte of the parameters of a stage that an update copies, because older versions are still in use."""
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name, seconds in self.times().items():
            if not (math.isfinite(seconds) and 0 <= seconds <= LONGEST_S):
                raise InputError(f"the executor's {name} of {seconds:g} s is out of range, which is 0 to {LONGEST_S:g}")

    def times(self) -> dict[str, float]:
        """The times by the names of their fields."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_s")}

    def __bool__(self) -> bool:
        """Whether anything is charged."""
        return any(self.times().values())

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return asdict(self)


NO_COSTS = ExecutorCosts()
