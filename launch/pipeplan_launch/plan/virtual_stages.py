"""Orders of the passes of a pipeline whose devices run several stages each ("virtual stages"). Torch-free.

A *device* is a position in the pipeline. Each of its replicas is one worker. With p devices and v stages on each device
there are p·v stages. Two placements exist:

    looped      stage s is on device s mod p                      interleaved-1f1b, any v
    v-shaped    stages i and 2p − 1 − i are on device i           zb-v, v = 2

`interleaved_passes` has the order of Megatron-LM (Narayanan et al., Efficient Large-Scale Language Model Training on
GPU Clusters, SC 2021, arXiv 2104.04473): minibatches come in rounds of p, and a device runs a round through its first
stage, then through its second, and so on. Here are the passes of the first of two devices with stages 0 and 2, for
four minibatches:

    F0 F0 F2 F2 F0 B2 F0 B2 F2 B0 F2 B0 B2 B2 B0 B0       (minibatches 0 1 0 1 2 0 3 1 2 0 3 1 2 3 2 3)

`zero_bubble_v_passes` has the order of ZB-V (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv
2405.15362): a minibatch goes down through the first stages of all devices and comes back up through the second stages.
Gradients of weights fill the gaps.

Both orders need whole rounds. For any other number of minibatches the order is made for the next larger number with
whole rounds, and the passes of minibatches that do not exist are left out. Leaving out whole minibatches cannot cause a
deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
StagePass = tuple[str, int, int]
"""(`F`, `B` or `W`; index of the stage on its device; index of the minibatch on its replica)."""


def looped_device(stage: int, devices: int) -> int:
    """The device of a stage in the looped placement."""
    return stage % devices


def v_shaped_device(stage: int, devices: int) -> int:
    """The device of a stage in the v-shaped placement."""
    return min(stage, 2 * devices - 1 - stage)


@dataclass(frozen=True, slots=True)
class VirtualStages:
    """A schedule's placement of several stages on each device, and the order in which a device runs them."""

    device_of: Callable[[int, int], int]
    """(stage, number of devices) -> the device that runs it."""
    passes: Callable[[int, int, int, int], Iterator[StagePass]]
    """(device, number of devices, stages of each device, minibatches) -> the passes of the device."""
    most: int | None = None
    """The only number of stages that a device may have; None if any number is possible."""

    def stages_of(self, device: int, devices: int, stages: int) -> list[int]:
        """The stages of a device, in increasing order."""
        return [stage for stage in range(stages) if self.device_of(stage, devices) == device]

    def refusal(self, stages: int, devices: int) -> str | None:
        """The reason why this number of stages cannot be placed on this number of devices; None if it can."""
        if stages % devices:
            return f"{stages} stages cannot be divided equally among {devices} devices"
        if self.most is not None and stages != self.most * devices:
            return f"each device needs {self.most} stages, and there are {stages} for {devices} devices"
        return None


def interleaved_passes(device: int, devices: int, chunks: int, minibatches: int) -> Iterator[StagePass]:
    """1F1B over virtual stages, in the order of Megatron-LM."""
    rounded = -(-minibatches // devices) * devices
    total = rounded * chunks
    warm_up = min(total, 2 * (devices - device - 1) + (chunks - 1) * devices)

    def forward(number: int) -> StagePass:
        return FORWARD, number // devices % chunks, number // (devices * chunks) * devices + number % devices

    def backward(number: int) -> StagePass:
        chunk = chunks - 1 - number // devices % chunks
        return BACKWARD, chunk, number // (devices * chunks) * devices + number % devices

    def whole() -> Iterator[StagePass]:
        yield from map(forward, range(warm_up))
        for number in range(total - warm_up):
            yield forward(warm_up + number)
            yield backward(number)
        yield from map(backward, range(total - warm_up, total))

    return (one for one in whole() if one[2] < minibatches)


def zero_bubble_v_passes(device: int, devices: int, chunks: int, minibatches: int) -> Iterator[StagePass]:
    """ZB-V: the first stage of a device is stage `device`, and its second stage is stage 2p − 1 − `device`."""
    assert chunks == 2
    rounded = max(2 * devices - 1, minibatches)
    return (one for one in _whole_v(device, devices, rounded) if one[2] < minibatches)


def _whole_v(device: int, devices: int, minibatches: int) -> Iterator[StagePass]:
    """ZB-V for at least 2p − 1 minibatches."""
    done = dict.fromkeys([(kind, chunk) for kind in (FORWARD, BACKWARD, WEIGHTS) for chunk in (0, 1)], 0)

    def run(chunk: int, kinds: str) -> Iterator[StagePass]:
        for kind in kinds:
            yield kind, chunk, done[kind, chunk]
            done[kind, chunk] += 1

    for _ in range(2 * (devices - device) - 1):
        yield from run(0, FORWARD)
    for _ in range(device):
        yield from run(1, FORWARD)
        yield from run(0, FORWARD)
    for _ in range(devices - device):
        yield from run(1, FORWARD + BACKWARD + WEIGHTS)
    while done[FORWARD, 1] < minibatches:
        if done[FORWARD, 0] < minibatches:
            yield from run(0, FORWARD)
        yield from run(0, BACKWARD + WEIGHTS)
        yield from run(1, FORWARD + BACKWARD + WEIGHTS)
    for _ in range(device):
        yield from run(0, BACKWARD)
        yield from run(1, BACKWARD)
    for _ in range(devices - device):
        yield from run(0, BACKWARD + WEIGHTS)
    for chunk in (1, 0):
        while done[WEIGHTS, chunk] < minibatches:
            yield from run(chunk, WEIGHTS)


@dataclass(frozen=True, slots=True)
class Held:
    """Largest numbers of minibatches that a device holds for each of its stages, in one group of minibatches."""

    awaiting: tuple[int, ...]
    """Between forward and backward, by stage of the device."""
    deferred: tuple[int, ...]
    """Between backward and the pass for gradients of weights, by stage of the device."""


def most_held(passes: Iterable[StagePass], chunks: int, *, splits: bool) -> Held:
    """The `Held` of a device that runs these passes. `splits`: whether a minibatch ends with W instead of B."""
    awaiting, deferred = [0] * chunks, [0] * chunks
    most_awaiting, most_deferred = [0] * chunks, [0] * chunks
    for kind, chunk, _ in passes:
        awaiting[chunk] += (kind == FORWARD) - (kind == BACKWARD)
        if splits:
            deferred[chunk] += (kind == BACKWARD) - (kind == WEIGHTS)
        most_awaiting[chunk] = max(most_awaiting[chunk], awaiting[chunk])
        most_deferred[chunk] = max(most_deferred[chunk], deferred[chunk])
    return Held(tuple(most_awaiting), tuple(most_deferred))
