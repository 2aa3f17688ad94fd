"""A replay, and a run, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing. docs/trace.md.

The format is Google's "Trace Event Format", JSON object form: complete events `X`, counters `C`, metadata `M`; `ts` and
`dur` in microseconds. A server is a process; a worker has two threads, for what it does and for what its all-reduces do
behind that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan.measured.run import ALL_REDUCE, BACKWARD, FORWARD, WAIT, Run
from pipeplan.simulation import lanes
from pipeplan.simulation.engine import Replayed, Transfer, replay
from pipeplan.simulation.lanes import Bar, Lane
from pipeplan.simulation.memory import memory_over_time
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.schedule import Kind

PREDICTED, MEASURED = "predicted", "measured"
Event = dict[str, Any]


@dataclass(frozen=True)
class _Group:
    """The processes of one of the two."""

    name: str
    scenario: Scenario
    offset: int
    """Added to the numbers of its processes."""

    def process(self, worker: int) -> int:
        """Perfetto takes process and thread 0 for idle time: so both count from 1 here."""
        return self.offset + self.scenario.server_of(worker) + 1

    def events(self, found: Sequence[Lane]) -> Iterator[Event]:
        """Of all workers."""
        for server in sorted({self.scenario.server_of(lane.worker) for lane in found}):
            yield from self.named(self.offset + server + 1, f"server {server}", 2 * server)
        for lane in found:
            process, does, sums = self.process(lane.worker), *_threads(lane.worker)
            yield _name("thread_name", process, does, f"worker {lane.worker}, stage {lane.stage + 1}")
            if any(bar.kind == ALL_REDUCE for bar in lane.bars):
                yield _name("thread_name", process, sums, f"worker {lane.worker}, all-reduce")
            for bar in lane.bars:
                yield _complete(bar, lane.stage, process, sums if bar.kind == ALL_REDUCE else does)
            for time_s, held in _in_flight(lane, self.scenario.schedule.trains):
                yield _counter(f"in flight on worker {lane.worker}", process, does, time_s, {"minibatches": held})

    def named(self, process: int, text: str, order: int) -> Iterator[Event]:
        """Processes of the same name come one above the other."""
        yield _name("process_name", process, 0, f"{text}, {self.name}")
        position = order + (self.name == MEASURED)
        yield _name("process_sort_index", process, 0, position, "sort_index")


def trace_document(scenario: Scenario, replayed: Replayed) -> dict[str, Any]:
    """The trace of a replay, ready to be written as JSON."""
    minibatches = sum(done.stage == 0 and done.action.kind is Kind.FORWARD for done in replayed.actions)
    group = _Group(PREDICTED, scenario, 0)
    events = [
        *group.events(lanes.predicted(scenario, replayed, minibatches)),
        *_links(group, replayed.transfers),
        *_memory(group, replayed, minibatches),
    ]
    return _document(scenario, events)


def measured_document(scenario: Scenario, run: Run, most: int | None = None) -> dict[str, Any]:
    """The trace of a run of this plan, at most so many minibatches. Raises `InputError` where it recorded nothing."""
    measured = lanes.within(lanes.measured(scenario, run), scenario, _recorded(run, most)[1])
    return _document(scenario, list(_Group(MEASURED, scenario, 0).events(measured)))


def overlaid_document(scenario: Scenario, run: Run, most: int | None = None) -> dict[str, Any]:
    """Both, of the minibatches that the run recorded, at most so many. Raises `InputError` where it recorded nothing.

    Numbers of processes and threads are those that each has alone, the measured processes' some power of ten higher.
    """
    measured = lanes.measured(scenario, run)
    first, end = _recorded(run, most)
    measured = lanes.within(measured, scenario, end)
    # What follows them keeps the pipeline full, as it did in the run.
    whole = next(iter(run.recorded.values())).epoch_minibatches
    count = min(whole - first, end - first + 2 * scenario.in_flight)
    replayed = replay(scenario, count)
    played = lanes.within(lanes.predicted(scenario, replayed, count), scenario, end - first)
    end_s = max((bar.end_s for lane in played for bar in lane.bars), default=0.0)
    group = _Group(PREDICTED, scenario, 0)
    offset = 10 ** len(str(_link_process(group)))
    events = [
        *group.events(lanes.shifted(played, scenario, first)),
        *_links(group, [done for done in replayed.transfers if done.start_s < end_s], first),
        *_memory(group, replayed, count, end_s),
        *_Group(MEASURED, scenario, offset).events(measured),
    ]
    return _document(scenario, events)


def _recorded(run: Run, most: int | None) -> tuple[int, int]:
    """(the first minibatch recorded, the end of the first so many)."""
    one = next(iter(run.recorded.values()), None)
    if one is None:
        return 0, 0
    return one.first, one.first + (one.minibatches if most is None else min(one.minibatches, most))


def _document(scenario: Scenario, events: list[Event]) -> dict[str, Any]:
    return {
        "displayTimeUnit": "ms",
        "otherData": {"plan": scenario.config, "schedule": scenario.schedule.name},
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event["ts"])),
    }


def _threads(worker: int) -> tuple[int, int]:
    """(for what a worker does, for its all-reduces)."""
    return 2 * worker + 1, 2 * worker + 2


def _in_flight(lane: Lane, trains: bool) -> Iterator[tuple[float, int]]:
    """How many minibatches a worker holds from when on: from its forward to the end of its backward pass."""
    changes: dict[tuple[int, int], float] = {}
    for bar in lane.bars:
        if bar.kind == FORWARD:
            changes[bar.action.index, 1] = bar.start_s
        if bar.kind == (BACKWARD if trains else FORWARD):
            changes[bar.action.index, -1] = bar.end_s
    held = 0
    for (_, change), time_s in sorted(changes.items(), key=lambda entry: (entry[1], entry[0][1])):
        held += change
        yield time_s, held


def _link_process(group: _Group) -> int:
    """Behind those of all servers."""
    return max(group.process(worker) for stage in group.scenario.stages for worker in stage.workers) + 1


def _links(group: _Group, transfers: Sequence[Transfer], first: int = 0) -> Iterator[Event]:
    """Rows of links."""
    if not transfers:
        return
    process = _link_process(group)
    yield from group.named(process, "links", 2 * process)
    threads = {row: number for number, row in enumerate(sorted({done.row for done in transfers}), start=1)}
    for row, thread in threads.items():
        yield _name("thread_name", process, thread, row)
    for row, number, start, end in transfers:
        yield {
            "name": str(number + first),
            "cat": "link",
            "ph": "X",
            **_times(start, end),
            "pid": process,
            "tid": threads[row],
            "args": {"link": row},
        }


def _memory(group: _Group, replayed: Replayed, minibatches: int, end_s: float | None = None) -> Iterator[Event]:
    """Bytes that every worker holds over time."""
    for (stage, replica), sizes in memory_over_time(group.scenario, replayed, minibatches).items():
        worker = group.scenario.stages[stage].workers[replica]
        thread = _threads(worker)[0]
        for time_s, size in sizes:
            if end_s is None or time_s <= end_s:
                yield _counter(f"memory of worker {worker}", group.process(worker), thread, time_s, {"bytes": size})


def _complete(bar: Bar, stage: int, process: int, thread: int) -> Event:
    counted = "group" if lanes.counts_groups(bar.action) else "minibatch"
    return {
        "name": f"wait for {bar.action}" if bar.kind == WAIT else str(bar.action),
        "cat": bar.kind,
        "ph": "X",
        **_times(bar.start_s, bar.end_s),
        "pid": process,
        "tid": thread,
        "args": {"stage": stage + 1, counted: bar.action.index},
    }


def _times(start_s: float, end_s: float) -> dict[str, float]:
    """In whole nanoseconds, as viewers take them: what ends as the next begins does not reach into that."""
    start, end = round(start_s * 1e9), round(end_s * 1e9)
    return {"ts": start / 1e3, "dur": (end - start) / 1e3}


def _counter(name: str, process: int, thread: int, time_s: float, values: dict[str, int]) -> Event:
    times = {"ts": _times(time_s, time_s)["ts"]}
    return {"name": name, "ph": "C", **times, "pid": process, "tid": thread, "args": values}


def _name(kind: str, process: int, thread: int, value: str | int, field: str = "name") -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {field: value}}
