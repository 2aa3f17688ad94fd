"""The time of one update of workers that run several stages each, from the order of their passes.

Every device runs its passes in the executor's order; a pass starts when the one before it on the device has ended, and
its message has come. Links are used as if each message had one alone. The time ends on the first device, where the next
update begins: other devices may still compute gradients of weights then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan_launch.plan.virtual_stages import VirtualStages

MOST_PASSES = 300_000
"""Passes of one update beyond which the time is not computed; a hundred thousand take a tenth of a second."""


@dataclass(frozen=True)
class StagePasses:
    """Seconds of the passes of one stage, and of its messages."""

    forward_s: float
    backward_s: float
    """The backward pass as far as the stage before waits for it."""
    weights_s: float
    """Gradients of the weights; 0 where they are a part of the backward pass."""
    send_s: float = 0.0
    """Time from the end of a forward pass until the next stage has its message."""
    return_s: float = 0.0
    """Time from the end of the next stage's backward pass until this stage has the message."""


def first_device_done_s(
    placement: VirtualStages, stages: Sequence[StagePasses], devices: int, minibatches: int
) -> tuple[float, float] | None:
    """Seconds from the first pass to the last of the first stage, and to the last of its device.

    None where there are too many passes.
    """
    if 3 * len(stages) * minibatches > MOST_PASSES:
        return None
    last = len(stages) - 1
    forward: list[list[float | None]] = [[None] * minibatches for _ in stages]
    backward: list[list[float | None]] = [[None] * minibatches for _ in stages]
    own = [placement.stages_of(device, devices, len(stages)) for device in range(devices)]
    orders = [list(placement.passes(device, devices, len(own[device]), minibatches)) for device in range(devices)]
    position, free_s, done_s = [0] * devices, [0.0] * devices, 0.0
    waiting = list(range(devices))
    left = sum(map(len, orders))
    while left:
        before = left
        for device in waiting:
            order, now, at = orders[device], free_s[device], position[device]
            while at < len(order):
                kind, chunk, minibatch = order[at]
                stage = own[device][chunk]
                times = stages[stage]
                if kind == "F":
                    ready = 0.0 if stage == 0 else forward[stage - 1][minibatch]
                    if ready is None:
                        break
                    now = max(now, ready + (stages[stage - 1].send_s if stage else 0.0)) + times.forward_s
                    forward[stage][minibatch] = now
                elif kind == "B":
                    ready = 0.0 if stage == last else backward[stage + 1][minibatch]
                    if ready is None:
                        break
                    now = max(now, ready + (times.return_s if stage < last else 0.0)) + times.backward_s
                    backward[stage][minibatch] = now
                else:
                    now += times.weights_s
                done_s = now if stage == 0 else done_s
                at += 1
            left -= at - position[device]
            free_s[device], position[device] = now, at
        assert left < before, "the order of passes comes to a deadlock"
    return done_s, free_s[0]
