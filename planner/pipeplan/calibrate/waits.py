"""How long all-reduces themselves hold a stage up, from the metrics of its workers.

Of the replicas that join an all-reduce, the one that comes last waits for nothing but the transfer: of every update the
least that a replica was held up. The rest of what the others waited is for slower replicas, and no link's doing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pipeplan.plan import ACCUMULATING, DOUBLE_BUFFERED, Plan

FILLING = 2
"""Updates at the begin of an epoch that are left out."""


def hides(plan: Plan, index: int) -> bool:
    """Whether other passes come between the start of a stage's all-reduce and its update."""
    return plan.lag(index) > 0 or plan.schedule == DOUBLE_BUFFERED


def group_of(plan: Plan, index: int) -> int:
    """Minibatches of the pipeline for which a stage makes one update."""
    accumulated = plan.accumulate if plan.schedule in ACCUMULATING else None
    return accumulated or plan.stages[index].replicas


def transfers_s(folder: Path, plan: Plan) -> tuple[float | None, ...]:
    """By stage: the median over its updates, s; None where that cannot be told, or there are no metrics."""
    return tuple(_transfer_s(folder, plan, index) for index in range(len(plan.stages)))


def _transfer_s(folder: Path, plan: Plan, index: int) -> float | None:
    stage = plan.stages[index]
    if plan.inference or stage.replicas == 1 or hides(plan, index):
        return None
    held: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for worker in stage.workers:
        for epoch, minibatch, sync_s in _lines(folder / "metrics" / f"rank-{worker}.jsonl"):
            group = minibatch // group_of(plan, index)
            if group >= FILLING:
                held[epoch, group][worker] += sync_s
    whole = [min(times.values()) for times in held.values() if len(times) == stage.replicas]
    return statistics.median(whole) if whole else None


def _lines(path: Path) -> Iterator[tuple[int, int, float]]:
    """Epoch, minibatch and time of every line that is whole."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        try:
            found = json.loads(line)
            one = int(found["epoch"]), int(found["minibatch"]), float(found["sync_s"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
        if 0 <= one[2] < math.inf:
            yield one
