"""Timeline of a worker's first minibatches of an epoch: `timeline/rank-N.json` in the run folder. Torch-free.

Times count from the moment when all workers had met at the start of the epoch (`synchronise_workers`). The clocks of
different machines are not compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeplan_launch.files import explain_errors, write_atomically
from pipeplan_launch.telemetry.recorder import Stopwatch
from pipeplan_launch.telemetry.run_folder import TIMELINE_FORMAT, TIMELINE_VERSION

TIMELINE_FOLDER = "timeline"
MIN_INTERVAL_S = 2e-5
"""Shorter intervals may be left out: waits for tensors that had already arrived, and remainders after a pass."""
RECORDED_MINIBATCHES = 256
"""Number of minibatches of the pipeline that are recorded, from the first of an epoch: some steady state of any plan.
"""


class Timeline:
    """Intervals of one worker. Nothing is recorded before an epoch is begun."""

    def __init__(self, plan: str, rank: int, stage: int, replica: int, name: str | None = None) -> None:
        """`plan`: the plan's digest. `name`: that of the file, without its ending; None for `rank-N`."""
        self._name = f"rank-{rank}" if name is None else name
        self._identity = {"plan": plan, "rank": rank, "stage": stage, "replica": replica}
        self._intervals: list[tuple[str, int, float, float]] = []
        self._epoch, self._count, self._first, self._end = 0, 0, 0, 0
        """The recorded minibatches of epoch `_epoch`, which has `_count`, are those from `_first` up to `_end`."""
        self._zero_s = 0.0

    def begin(self, epoch: int, first: int, count: int, met_s: float) -> None:
        """Start an epoch of `count` minibatches at minibatch `first`; all workers met at time `met_s`."""
        self._intervals = []
        self._epoch, self._count, self._first, self._end = epoch, count, first, min(count, first + RECORDED_MINIBATCHES)
        self._zero_s = met_s

    def note(self, kind: str, minibatch: int, lap: Stopwatch, *, keep_brief: bool = True) -> None:
        """Record that the stopwatch's last lap was spent on this minibatch."""
        if minibatch < self._end and (keep_brief or lap.end_s - lap.start_s >= MIN_INTERVAL_S):
            self._intervals.append((kind, minibatch, lap.start_s, lap.end_s))

    def note_group(
        self,
        kind: str,
        group: int,
        first: int,
        lap: Stopwatch,
        *,
        since_s: float | None = None,
        keep_brief: bool = True,
    ) -> None:
        """Record an interval of the group of minibatches that starts with `first`: the stopwatch's last lap, or from
        the `time.perf_counter` reading `since_s` to the lap's end.
        """
        if first < self._end and (keep_brief or lap.end_s - lap.start_s >= MIN_INTERVAL_S):
            self._intervals.append((kind, group, lap.start_s if since_s is None else since_s, lap.end_s))

    def write(self, run: Path) -> None:
        """Write the recorded intervals into a run folder, replacing older ones. Raises `LaunchError`."""
        path = run / TIMELINE_FOLDER / f"{self._name}.json"
        with explain_errors(path, "writing"):
            path.parent.mkdir(exist_ok=True)
        head: dict[str, Any] = {"format": TIMELINE_FORMAT, "version": TIMELINE_VERSION, **self._identity}
        head |= {"epoch": self._epoch, "epoch_minibatches": self._count}
        head |= {"first": self._first, "minibatches": self._end - self._first}
        rows = [
            json.dumps([kind, number, round(start - self._zero_s, 7), round(end - self._zero_s, 7)])
            for kind, number, start, end in sorted(self._intervals, key=lambda interval: interval[2:])
        ]
        text = json.dumps(head)[:-1] + ', "intervals": [\n' + ",\n".join(rows) + "\n]}\n"
        write_atomically(path, lambda file: file.write(text.encode()), sync=False)
