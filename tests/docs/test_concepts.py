"""The timeline in docs/concepts.md is what the executor's own schedule gives, not a drawing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeplan_launch.plan.schedule import Action, ActionKind, StageShape, one_f_one_b

CONCEPTS = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
PIPELINE = (StageShape(replicas=2, depth=2), StageShape(replicas=1, depth=1))
# A stage on two workers may take twice as long for a minibatch, forward and backward: then both keep the same step
# time.
DURATION = (2, 1)
MINIBATCHES = 8
SLOTS = 12
WORKERS = [(stage, replica) for stage, shape in enumerate(PIPELINE) for replica in range(shape.replicas)]
WIDTH = 3


def timeline() -> list[str]:
    """One row a worker, one column a slot; transfers and all-reduces take no time, yet are waited for."""
    streams = {worker: list(one_f_one_b(PIPELINE, *worker, MINIBATCHES)) for worker in WORKERS}
    clock = dict.fromkeys(WORKERS, 0)
    done: dict[tuple[int, Action], list[int]] = {}
    rows = {worker: ["."] * SLOTS for worker in WORKERS}
    while any(streams.values()):
        for worker, stream in streams.items():
            stage = worker[0]
            while stream and (ready := _ready(stage, stream[0], done)) is not None:
                action = stream.pop(0)
                start = max(clock[worker], ready)
                takes = DURATION[stage] if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD) else 0
                clock[worker] = start + takes
                done.setdefault((stage, action), []).append(clock[worker])
                for slot in range(start, min(start + takes, SLOTS)):
                    rows[worker][slot] = str(action) if slot == start else "-" * len(str(action))
    return [
        f"stage {stage + 1}, worker {number}  " + "".join(f"{cell:<{WIDTH}}" for cell in rows[stage, replica]).rstrip()
        for number, (stage, replica) in enumerate(WORKERS)
    ]


def _ready(stage: int, action: Action, done: dict[tuple[int, Action], list[int]]) -> int | None:
    """When everything that the action waits for is there; None as long as some of it is not."""
    if action.kind == ActionKind.FORWARD and stage > 0:
        return _last(done.get((stage - 1, action), []), 1)
    if action.kind == ActionKind.BACKWARD and stage + 1 < len(PIPELINE):
        return _last(done.get((stage + 1, action), []), 1)
    if action.kind == ActionKind.UPDATE:
        started = done.get((stage, Action(ActionKind.REDUCE, action.index)), [])
        return _last(started, PIPELINE[stage].replicas)
    return 0


def _last(times: Sequence[int], needed: int) -> int | None:
    return max(times) if len(times) == needed else None


def test_timeline_is_the_schedule() -> None:
    text = CONCEPTS.read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "F0" in block and "slot" in block]
    assert len(blocks) == 1
    drawn = [line.rstrip() for line in blocks[0].splitlines() if line.startswith("stage")]
    assert drawn == timeline()


if __name__ == "__main__":
    print("\n".join(timeline()))
