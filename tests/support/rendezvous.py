"""Devices that do one thing at a time, and transfers that need both ends: no code of the executor.

Every device has one queue. A step is (label, devices): a computation has one device, a transfer two, an all-reduce all
replicas of a stage. A step happens when it is at the head of the queues of all its devices, and then leaves them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Device = Hashable


@dataclass(frozen=True)
class Step:
    """Something that one or more devices do together."""

    label: str
    devices: tuple[Device, ...]

    @property
    def is_shared(self) -> bool:
        return len(self.devices) > 1


Queues = dict[Device, list[Step]]


def queues_of(order: Iterable[Step]) -> Queues:
    """What each device is handed: its own steps, in the common order."""
    queues: Queues = {}
    for step in order:
        for device in step.devices:
            queues.setdefault(device, []).append(step)
    return queues


def stuck_devices(queues: Mapping[Device, Sequence[Step]]) -> dict[Device, Step]:
    """The devices that wait for ever, and the step at the head of their queues; {} if all finish."""
    left = {device: deque(steps) for device, steps in queues.items()}
    look_at = deque(left)
    while look_at:
        device = look_at.popleft()
        while left[device]:
            step = left[device][0]
            if not all(left[other] and left[other][0] == step for other in step.devices):
                break
            for other in step.devices:
                left[other].popleft()
            look_at.extend(other for other in step.devices if other != device)
    return {device: steps[0] for device, steps in left.items() if steps}
