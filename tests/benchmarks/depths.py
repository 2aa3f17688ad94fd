"""Does the planner's in-flight depth keep the pace that it predicts? A replay of the executor's own action streams.

    python tests/benchmarks/depths.py

All plans with 2 to 4 stages of 1 to 4 replicas, balanced so that the pace is 1: a forward pass takes a third of a
replica's time per minibatch, a backward pass two thirds. Transfers and all-reduces take the given shares of the pace.
A plan misses where it runs at under 0.97 of the pace.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from pipeplan.cost import formulas
from pipeplan_launch.plan.schedule import SCHEDULES, Action, ActionKind, StageShape

MISS = 0.97
FORWARD = 1 / 3
Replicas = tuple[int, ...]


def planned(replicas: Replicas, transfer: float, allreduce: float) -> list[int]:
    """The planner's depths."""
    depths = [1]
    for here, following in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        waits = [
            float(formulas.group_wait(allreduce * count if count > 1 else 0.0, 1.0, count))
            for count in (here, following)
        ]
        behind = formulas.in_flight_behind(depths[0], following, waits[1])
        depths.insert(0, int(formulas.in_flight_depth(behind, waits[0], transfer, 1.0, here)))
    return depths


def without_waits(replicas: Replicas, transfer: float, _allreduce: float) -> list[int]:
    """Depths that cover what is in flight and the transfers, but not that the replicas wait for one another."""
    depths = [1]
    for here, following in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        depths.insert(0, 1 + math.ceil((depths[0] * following + 2 * transfer) / here - 1e-9))
    return depths


class Replay:
    """Runs every replica's stream on a clock of its own; messages arrive a transfer later."""

    def __init__(
        self, replicas: Replicas, depths: Sequence[int], transfer: float, allreduce: float, count: int
    ) -> None:
        self.replicas, self.transfer, self.allreduce = replicas, transfer, allreduce
        shapes = [StageShape(*shape) for shape in zip(replicas, depths, strict=True)]
        stream = SCHEDULES["1f1b-stashing"].stream
        workers = [(stage, replica) for stage, number in enumerate(replicas) for replica in range(number)]
        self.todo = {worker: list(stream(shapes, *worker, count)) for worker in workers}
        self.next = dict.fromkeys(workers, 0)
        self.clock = dict.fromkeys(workers, 0.0)
        self.done: dict[tuple[int, Action], list[float]] = defaultdict(list)

    def run(self) -> list[float]:
        """When the first stage ends the backward pass of each minibatch. Raises RuntimeError on a deadlock."""
        moved = True
        while moved:
            moved = sum(self._advance(worker) for worker in self.todo) > 0
        if any(self.next[worker] < len(actions) for worker, actions in self.todo.items()):
            raise RuntimeError(f"replicas {self.replicas} deadlock")
        ends = {
            action.index: times[0] for (stage, action), times in self.done.items() if stage == 0 and action.kind == "B"
        }
        return [ends[index] for index in sorted(ends)]

    def _advance(self, worker: tuple[int, int]) -> bool:
        moved = False
        while self.next[worker] < len(self.todo[worker]):
            action = self.todo[worker][self.next[worker]]
            ready = self._ready(worker[0], action)
            if ready is None:
                break
            self.clock[worker] = max(self.clock[worker], ready) + self._takes(worker[0], action)
            self.done[worker[0], action].append(self.clock[worker])
            self.next[worker] += 1
            moved = True
        return moved

    def _takes(self, stage: int, action: Action) -> float:
        share = {ActionKind.FORWARD: FORWARD, ActionKind.BACKWARD: 1 - FORWARD}.get(action.kind, 0.0)
        return share * self.replicas[stage]

    def _ready(self, stage: int, action: Action) -> float | None:
        """When what an action waits for is there; None while some of it has not begun."""
        if action.kind == ActionKind.UPDATE:
            started = self.done[stage, Action(ActionKind.REDUCE, action.index)]
            whole = self.allreduce * self.replicas[stage] if self.replicas[stage] > 1 else 0.0
            return max(started) + whole if len(started) == self.replicas[stage] else None
        neighbour = {ActionKind.FORWARD: stage - 1, ActionKind.BACKWARD: stage + 1}.get(action.kind, -1)
        if not 0 <= neighbour < len(self.replicas):
            return 0.0
        sent = self.done[neighbour, action]
        return sent[0] + self.transfer if sent else None


def share_of_pace(replicas: Replicas, depths: Sequence[int], transfer: float, allreduce: float) -> float:
    """The steady pace over the predicted one, from the middle third of the minibatches, in whole rounds."""
    round_ = math.lcm(*replicas)
    count = 8 * round_ + 60
    ends = Replay(replicas, depths, transfer, allreduce, count).run()
    first = count // 3
    last = first + max(1, (count // 3) // round_) * round_
    return (last - first) / (ends[last] - ends[first])


def main() -> None:
    """Print how many plans miss, for both rules."""
    plans = [plan for stages in (2, 3, 4) for plan in itertools.product(range(1, 5), repeat=stages)]
    table = Table("depths", "transfer", "all-reduce", f"plans under {MISS}", "worst")
    rules: list[tuple[str, Callable[[Replicas, float, float], list[int]]]] = [
        ("the planner's", planned),
        ("without waits", without_waits),
    ]
    for (name, rule), transfer, allreduce in itertools.product(rules, (0.0, 0.01, 0.1, 0.5), (0.0, 0.3, 0.6, 1.0)):
        shares = [(share_of_pace(plan, rule(plan, transfer, allreduce), transfer, allreduce), plan) for plan in plans]
        missed = sum(share < MISS for share, _ in shares)
        worst, plan = min(shares)
        row = "-".join(map(str, plan))
        table.add_row(name, f"{transfer:g}", f"{allreduce:g}", f"{missed} of {len(plans)}", f"{worst:.2f} ({row})")
    Console().print(table)


if __name__ == "__main__":
    main()
