"""Activations that wait in a simulation until the executor has posted their receive.

The executor posts the receives of a few minibatches ahead, and a message leaves only when its receive is posted.
Receives of gradients are posted before the activations leave, so gradients never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeplan_launch.plan.schedule import POSTED_RECEIVES, Action, ActionKind


class PostedReceives:
    """The receives of activations of all workers."""

    def __init__(self, replicas: Sequence[int]) -> None:
        """`replicas`: the number of replicas of every stage."""
        self._replicas = replicas
        self._taken: dict[tuple[int, int], int] = {}
        """(stage, replica) -> the number of minibatches whose activations it has taken."""
        self._held: dict[tuple[int, int], Callable[[], None]] = {}
        """(stage, minibatch) -> what starts the message whose receive has not been posted."""

    def start(self, stage: int, action: Action, start: Callable[[], None]) -> None:
        """Start the message that an action sends to a stage, at once or when its receive is posted."""
        turn, replica = divmod(action.index, self._replicas[stage])
        if action.kind is ActionKind.FORWARD and turn >= self._taken.get((stage, replica), 0) + POSTED_RECEIVES:
            self._held[stage, action.index] = start
        else:
            start()

    def take(self, stage: int, minibatch: int) -> None:
        """Note that a replica has taken the activations of a minibatch, and posts the next receive."""
        replicas = self._replicas[stage]
        turn, replica = divmod(minibatch, replicas)
        self._taken[stage, replica] = turn + 1
        if (start := self._held.pop((stage, minibatch + POSTED_RECEIVES * replicas), None)) is not None:
            start()
