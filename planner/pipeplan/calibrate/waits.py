"""The time for which the transfer of an all-reduce holds a stage up, from the metrics of its workers.

The last replica to join an all-reduce waits only for the transfer. So the least waiting time of the replicas at an
update is the time of the transfer. The other replicas also wait for slower replicas, which is not due to a link.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pipeplan.plan import Plan
from pipeplan.schedules import ACCUMULATING, DOUBLE_BUFFERED

FILLING = 2
"""Updates at the beginning of an epoch that are left out."""


def hides(plan: Plan, index: int) -> bool:
    """Whether other passes come between the start of a stage's all-reduce and its update."""
    return plan.lag(index) > 0 or plan.schedule == DOUBLE_BUFFERED


def group_of(plan: Plan, index: int) -> int:
    """Number of the pipeline's minibatches per update of a stage."""
    accumulated = plan.accumulate if plan.schedule in ACCUMULATING else None
    return accumulated or plan.stages[index].replicas


def transfers_s(folder: Path, plan: Plan) -> tuple[float | None, ...]:
    """By stage: the median over its updates, in seconds; None where it is not known."""
    return tuple(_transfer_s(folder, plan, index) for index in range(len(plan.stages)))


def _transfer_s(folder: Path, plan: Plan, index: int) -> float | None:
    stage = plan.stages[index]
    if plan.inference or stage.replicas == 1 or hides(plan, index):
        return None
    waited: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for worker in stage.workers:
        for epoch, minibatch, sync_s in _lines(folder / "metrics" / f"rank-{worker}.jsonl"):
            group = minibatch // group_of(plan, index)
            if group >= FILLING:
                waited[epoch, group][worker] += sync_s
    transfers = [min(times.values()) for times in waited.values() if len(times) == stage.replicas]
    return statistics.median(transfers) if transfers else None


def _lines(path: Path) -> Iterator[tuple[int, int, float]]:
    """Epoch, minibatch and all-reduce time of every complete line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        try:
            step = json.loads(line)
            epoch, minibatch, sync_s = int(step["epoch"]), int(step["minibatch"]), float(step["sync_s"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        if 0 <= sync_s < math.inf:
            yield epoch, minibatch, sync_s
