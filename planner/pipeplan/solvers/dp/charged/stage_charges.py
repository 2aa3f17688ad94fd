"""What one stage adds to the loads of the components that its workers lie in: bytes on cards, and time of cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.charged.resource_levels import ResourceLevel


@dataclass(frozen=True)
class StageCharges:
    """The bytes that stages on placements put on the card of each of their workers, per minibatch of the whole plan."""

    hop: Floats
    """Bytes of the ring of the stage's replicas, on each hop."""
    copied: Floats
    """Bytes of the rings among copies of the pipeline."""
    directions: tuple[tuple[Floats, Floats], ...]
    """For outgoing and incoming traffic, bytes of messages of the cut behind the stage, and of the cut in front."""

    def card_loads(
        self, level: ResourceLevel, placement: Ints, behind: Floats, ahead: Floats, busy: Floats
    ) -> tuple[Floats, Floats]:
        """Seconds that cards of a level are busy in one direction: the longest complete load, and the pending one.

        `busy` is the load of the component of the last worker with the traffic of the cut behind the stage.
        """
        first, last = level.first[placement], level.last[placement]
        ending, beginning = level.in_last[placement], level.in_first[placement]
        end = busy + (self.hop + ending * self.copied) * level.per_ring[last] + ending * ahead * level.per_message[last]
        straddles = first != last
        complete = np.where(straddles, end, 0.0)
        for index, held in level.middle:
            count = level.stop[index] - level.start[index]
            load = count * (behind + ahead) * level.per_message[index]
            load = load + (self.hop + count * self.copied) * level.per_ring[index]
            complete = np.maximum(complete, np.where(held[placement], load, 0.0))
        across = (
            beginning * behind * level.per_message[first] + (self.hop + beginning * self.copied) * level.per_ring[first]
        )
        within = busy + beginning * self.copied * level.per_ring[first]
        return complete, np.where(straddles, across, within)


def core_loads(level: ResourceLevel, placement: Ints, core_s: Floats, busy: Floats) -> tuple[Floats, Floats]:
    """Seconds that the cores of servers are busy: the longest complete load, and that pending at the first server."""
    first, last = level.first[placement], level.last[placement]
    end = busy + level.in_last[placement] * core_s * level.per_core[last]
    complete = end
    for index, held in level.middle:
        load = (level.stop[index] - level.start[index]) * core_s * level.per_core[index]
        complete = np.maximum(complete, np.where(held[placement], load, 0.0))
    return complete, np.where(first != last, level.in_first[placement] * core_s * level.per_core[first], end)


def meeting_pairs(sending: Ints, receiving: Ints, common: Ints) -> Ints:
    """Pairs that meet of the last `sending` senders and the first `receiving` receivers, in one period.

    Sender p and receiver q meet if p ≡ q modulo `common`, which divides the number of either.
    """
    rounds, more = np.divmod(sending, common)
    others, rest = np.divmod(receiving, common)
    pairs: Ints = common * rounds * others + rounds * rest + others * more + np.maximum(0, more + rest - common)
    return pairs
