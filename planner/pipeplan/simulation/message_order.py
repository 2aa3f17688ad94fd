"""When messages may start in a simulation of the transport `nccl`, which keeps one order on all workers.

The order is that of the executor (`pipeplan_launch.plan.communication_order`). A message starts when its pass has
ended, when it is the next one of its queue, and when its slot of the receiver's ring has been read. Each pair of
workers and direction has a queue. Before a worker has a third message to the same worker under way in one direction,
its computing waits until the first of these has left.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from pipeplan.errors import InputError
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.text import did_you_mean
from pipeplan_launch.plan.communication_order import (
    MOST_UNSETTLED,
    Computation,
    Direction,
    Place,
    Transfer,
    communication_order,
    last_reader,
    ring_slots,
)
from pipeplan_launch.plan.schedule import Action

GLOO, NCCL = "gloo", "nccl"
TRANSPORTS = (GLOO, NCCL)
"""Values of launch.sh's `--transport`; with `gloo` messages start as soon as they are made."""
_Key = tuple[Direction, int, int]
"""(direction, stage that sends, minibatch) of a message."""


def check_transport(name: str) -> None:
    """Raise an `InputError` for a transport that does not exist."""
    if name == "host":
        raise InputError(f"the transport 'host' is called {GLOO!r} now")
    if name not in TRANSPORTS:
        raise InputError(f"there is no transport {name!r}; {did_you_mean(name, TRANSPORTS)}")


def message_order(scenario: Scenario, minibatches: int) -> MessageOrder | None:
    """The order of a scenario's messages; None where they start as soon as they are made."""
    if scenario.transport != GLOO and scenario.schedule.virtual is not None:
        raise InputError(
            f"--transport {scenario.transport} is for workers with one stage each, and under {scenario.schedule.name} "
            "they have several"
        )
    return None if scenario.transport == GLOO else MessageOrder(scenario, minibatches)


class MessageOrder:
    """The messages of a simulation that have not arrived, in their queues."""

    def __init__(self, scenario: Scenario, minibatches: int) -> None:
        self._scenario = scenario
        self._nodes: dict[_Key, Transfer] = {}
        """Messages that have not arrived."""
        self._queues: dict[tuple[Place, Place], deque[Transfer]] = defaultdict(deque)
        """For each (sender, receiver) the messages that have not arrived."""
        self._ready: dict[Transfer, Callable[[], None]] = {}
        """What starts each message that has been made and has not started."""
        self._unread: set[tuple[Direction, int, int]] = set()
        """(direction, stage that receives, minibatch) of messages whose last reader is not done."""
        self._awaited: dict[tuple[Place, Action], list[Transfer]] = defaultdict(list)
        """For an action of a worker the messages that must have left before it."""
        self._read_order(minibatches)

    def _read_order(self, minibatches: int) -> None:
        under_way: dict[tuple[Place, Place, Direction], deque[Transfer]] = defaultdict(deque)
        settled: dict[Place, list[Transfer]] = defaultdict(list)
        for node in communication_order(self._scenario.schedule, self._scenario.shapes, minibatches):
            if isinstance(node, Computation):
                if before := settled.pop(node.place, None):
                    self._awaited[node.place, node.action] = before
            elif isinstance(node, Transfer):
                self._nodes[node.direction, node.source[0], node.minibatch] = node
                self._unread.add((node.direction, node.destination[0], node.minibatch))
                self._queues[node.source, node.destination].append(node)
                earlier = under_way[node.source, node.destination, node.direction]
                if len(earlier) == MOST_UNSETTLED:
                    settled[node.source].append(earlier.popleft())
                earlier.append(node)

    def made(self, direction: Direction, stage: int, minibatch: int, start: Callable[[], None]) -> None:
        """Note that a message has been made, and call `start` when it may start."""
        node = self._nodes[direction, stage, minibatch]
        self._ready[node] = start
        self._try(node)

    def arrived(self, direction: Direction, stage: int, minibatch: int) -> None:
        """Note that a message from this stage has left its queue, so that the next one may start."""
        node = self._nodes.pop((direction, stage, minibatch))
        queue = self._queues[node.source, node.destination]
        queue.popleft()
        if queue:
            self._try(queue[0])

    def may_compute(self, place: Place, action: Action) -> bool:
        """Whether the messages have left for which the worker's computing waits before this action."""
        waits = self._awaited.get((place, action), ())
        return not any((node.direction, node.source[0], node.minibatch) in self._nodes for node in waits)

    def computed(self, stage: int, action: Action) -> None:
        """Note that an action is done: the messages that it was the last to read make room for others."""
        for direction in Direction:
            if action.kind is not last_reader(direction, self._scenario.schedule):
                continue
            self._unread.discard((direction, stage, action.index))
            following = action.index + self._ring(direction, stage)
            sender = stage - 1 if direction is Direction.ACTIVATIONS else stage + 1
            if (node := self._nodes.get((direction, sender, following))) is not None:
                self._try(node)

    def _ring(self, direction: Direction, stage: int) -> int:
        """Minibatches of the pipeline from one use of a slot to the next."""
        shape = self._scenario.shapes[stage]
        return ring_slots(direction, shape, self._scenario.schedule) * shape.replicas

    def _try(self, node: Transfer) -> None:
        stage = node.destination[0]
        earlier = (node.direction, stage, node.minibatch - self._ring(node.direction, stage))
        if node not in self._ready or earlier in self._unread:
            return
        if self._queues[node.source, node.destination][0] is node:
            self._ready.pop(node)()
