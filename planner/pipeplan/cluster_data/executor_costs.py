"""The executor's own costs on a device, in addition to the layers: its time, and the memory of a worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from pipeplan.errors import InputError
from pipeplan.util.typed import Amount, json_fields, settle_numbers

LONGEST_S = 3600.0
"""Longest time of one of these costs, in seconds."""
DISTURBED = ", beside other programs"
"""Suffix of the source of costs that were measured while other programs used the machine."""
LARGEST_SHARE = 10.0
"""Largest value of `allocator_share` and `activation_share`."""


@dataclass(frozen=True)
class ExecutorCosts:
    """Costs of the executor, in seconds on a device of speed 1, and in bytes; none by default.

    docs/cost-model.md, "The executor's own work" and "Memory of one worker", has the formulas. Raises an `InputError`
    if a figure is out of range.
    """

    pass_s: Amount = 0.0
    """Seconds for each forward and each backward pass of a minibatch through a stage."""
    message_s: Amount = 0.0
    """Seconds for each message that a stage sends or receives."""
    message_byte_s: Amount = 0.0
    """Seconds for each byte of a message."""
    version_byte_s: Amount = 0.0
    """Seconds for each byte of parameters that an update copies because older versions are still in use."""
    source: str = ""
    """Source of the figures."""
    worker_bytes: Amount = 0.0
    """Memory of a worker without a model: the interpreter, torch, the transport and their threads."""
    allocator_share: Amount = 0.0
    """Memory that the allocator keeps or cannot use, as a share of the memory that a stage needs."""
    activation_share: Amount = 0.0
    """Additional memory of the allocator for the activations that layers save, as a share of these activations."""
    sample_s: Amount = 0.0
    """Seconds for handling the samples and the loss of a minibatch, at the first and at the last stage."""
    step_s: Amount = 0.0
    """Seconds for each step of the optimiser at a stage, in addition to the time in the layers' figures."""
    read_s: Amount = 0.0
    """Seconds for reading the samples of a minibatch from the job's data, at the first and at the last stage."""
    correction_byte_s: Amount = 0.0
    """Additional seconds for each byte of copied parameters if updates are corrected for old gradients."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        for name, seconds in self.times().items():
            if not (math.isfinite(seconds) and 0 <= seconds <= LONGEST_S):
                raise InputError(f"the executor's {name} of {seconds:g} s is out of range, which is 0 to {LONGEST_S:g}")
        if not (math.isfinite(self.worker_bytes) and self.worker_bytes >= 0):
            raise InputError(f"the memory of a worker of {self.worker_bytes:g} bytes is out of range")
        for share in (self.allocator_share, self.activation_share):
            if not 0 <= share <= LARGEST_SHARE:
                raise InputError(f"an allocator's share of {share:g} is out of range, which is 0 to {LARGEST_SHARE:g}")

    @property
    def disturbed(self) -> bool:
        """Whether other programs used the machine while the costs were measured."""
        return self.source.endswith(DISTURBED)

    @property
    def samples_s(self) -> float:
        """Time of reading and handling the samples of a minibatch, at the first and at the last stage."""
        return self.sample_s + self.read_s

    def with_correction(self) -> ExecutorCosts:
        """These costs, with a `version_byte_s` that includes the correction of updates."""
        return replace(self, version_byte_s=self.version_byte_s + self.correction_byte_s)

    def times(self) -> dict[str, float]:
        """The times by the names of their fields."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_s")}

    def __bool__(self) -> bool:
        """Whether any cost is above 0."""
        shares = self.allocator_share, self.activation_share
        return any(self.times().values()) or any((self.worker_bytes, *shares))

    def memory_with(self, stage_bytes: float) -> float:
        """Memory in bytes of a worker whose stage needs `stage_bytes`: docs/cost-model.md, "Memory of one worker"."""
        return self.worker_bytes + (1 + self.allocator_share) * stage_bytes

    def room_in(self, memory_bytes: float) -> float:
        """Bytes that a stage may need on a worker with this memory; negative if the worker alone needs more."""
        return (memory_bytes - self.worker_bytes) / (1 + self.allocator_share)

    def memory_only(self) -> ExecutorCosts:
        """A copy with all times set to 0. The costs of memory are kept."""
        nothing: dict[str, Any] = dict.fromkeys(self.times(), 0.0)
        return replace(self, **nothing)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON. Fields that older files lack are left out if they are 0."""
        return json_fields(self, "sample_s", "step_s", "read_s", "correction_byte_s")


NO_COSTS = ExecutorCosts()
