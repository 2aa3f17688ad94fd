"""Writes a simulation, alone or together with a run, as a trace for Perfetto or chrome://tracing (docs/report.md).

The format is Google's "Trace Event Format" in its JSON object form, with complete events `X`, counters `C`, flows `s`
and `f`, metadata `M`, and `ts` and `dur` in microseconds. A server is shown as a process. A worker is shown as two
threads: one for its actions, and one for the all-reduces that overlap with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan.run_data.run_folder import ALL_REDUCE, BACKWARD, FORWARD, WAIT, WEIGHTS, MeasuredRun
from pipeplan.simulation import lanes
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.events import SimulatedEvents, Transfer
from pipeplan.simulation.lanes import Bar, Lane
from pipeplan.simulation.memory import memory_over_time
from pipeplan.simulation.scenario import Scenario
from pipeplan_launch.plan.schedule import ActionKind

PREDICTED, MEASURED = "predicted", "measured"
Event = dict[str, Any]


@dataclass(frozen=True)
class _Group:
    """The processes of the simulation or of the run."""

    name: str
    """Name of the group: `PREDICTED` or `MEASURED`."""
    scenario: Scenario
    offset: int
    """Number that is added to the numbers of all processes of the group."""

    def process(self, worker: int) -> int:
        """Number of the process of a worker's server, counted from 1, because Perfetto takes 0 for idle time."""
        return self.offset + self.scenario.server_of(worker) + 1

    def events(self, workers: Sequence[Lane]) -> Iterator[Event]:
        """The events of all workers."""
        for server in sorted({self.scenario.server_of(lane.worker) for lane in workers}):
            yield from self.named(self.offset + server + 1, f"server {server}", 2 * server)
        for lane in workers:
            process, actions, reduces = self.process(lane.worker), *_threads(lane.worker)
            yield _name("thread_name", process, actions, f"worker {lane.worker}, stage {lane.stage + 1}")
            if any(bar.kind == ALL_REDUCE for bar in lane.bars):
                yield _name("thread_name", process, reduces, f"worker {lane.worker}, all-reduce")
            for bar in lane.bars:
                yield _complete(bar, lane.stage, process, reduces if bar.kind == ALL_REDUCE else actions)
            for time_s, count in _in_flight(lane, self.scenario.schedule.trains):
                yield _counter(f"in flight on worker {lane.worker}", process, actions, time_s, {"minibatches": count})
        yield from self.flows(workers)

    def flows(self, workers: Sequence[Lane]) -> Iterator[Event]:
        """Arrows from each pass of a minibatch to its pass in the next stage (forward) or the previous stage
        (backward)."""
        passes: dict[tuple[str, int, int], list[tuple[Bar, int]]] = {}
        for lane in workers:
            for bar in lane.bars:
                if bar.kind in (FORWARD, BACKWARD):
                    passes.setdefault((bar.kind, lane.stage, bar.action.index), []).append((bar, lane.worker))
        for (kind, stage, index), parts in passes.items():
            following = passes.get((kind, stage + (1 if kind == FORWARD else -1), index))
            if following is None:
                continue
            what = "activations" if kind == FORWARD else "gradients"
            common = {"name": what, "cat": "flow", "id": f"{self.name} {kind} {stage + 1} {index}"}
            left, sender = max(parts, key=lambda part: part[0].end_s)
            met, receiver = min(following, key=lambda part: part[0].start_s)
            # Perfetto attaches an arrow to the slice around its time, so the arrow leaves a nanosecond early.
            leaves_s = max(left.start_s, left.end_s - 1e-9)
            ends: tuple[tuple[str, int, float, Event], ...] = (
                ("s", sender, leaves_s, {}),
                ("f", receiver, met.start_s, {"bp": "e"}),
            )
            for phase, worker, time_s, more in ends:
                place = {"pid": self.process(worker), "tid": _threads(worker)[0]}
                yield {**common, "ph": phase, "ts": _times(time_s, time_s)["ts"], **place, **more}

    def named(self, process: int, text: str, order: int) -> Iterator[Event]:
        """The name of a process and its position, which puts a server's predicted and measured processes together."""
        yield _name("process_name", process, 0, f"{text}, {self.name}")
        position = order + (self.name == MEASURED)
        yield _name("process_sort_index", process, 0, position, "sort_index")


def trace_document(scenario: Scenario, replayed: SimulatedEvents) -> dict[str, Any]:
    """The trace of a simulation, ready to be written as JSON."""
    minibatches = sum(done.stage == 0 and done.action.kind is ActionKind.FORWARD for done in replayed.actions)
    group = _Group(PREDICTED, scenario, 0)
    events = [
        *group.events(lanes.predicted_lanes(scenario, replayed, minibatches)),
        *_links(group, replayed.transfers),
        *_memory(group, replayed, minibatches),
    ]
    return _document(scenario, events)


def overlaid_document(scenario: Scenario, run: MeasuredRun, most: int | None = None) -> dict[str, Any]:
    """The trace of a run together with a simulation of the same minibatches, at most `most` of them.

    Processes and threads have the same numbers as in the separate traces, except that a power of ten is added to
    measured processes. Raises an `InputError` if the run recorded no timelines.
    """
    measured = lanes.measured_lanes(scenario, run)
    first, end = _recorded(run, most)
    measured = lanes.cut_lanes(measured, scenario, end)
    # Simulate more minibatches than are shown, so that the pipeline stays full, as in the run.
    epoch_minibatches = next(iter(run.recorded.values())).epoch_minibatches
    count = min(epoch_minibatches - first, end - first + 2 * scenario.in_flight)
    replayed = simulate_schedule(scenario, count)
    played = lanes.cut_lanes(lanes.predicted_lanes(scenario, replayed, count), scenario, end - first, first)
    end_s = max((bar.end_s for lane in played for bar in lane.bars), default=0.0)
    group = _Group(PREDICTED, scenario, 0)
    offset = 10 ** len(str(_link_process(group)))
    events = [
        *group.events(played),
        *_links(group, [done for done in replayed.transfers if done.start_s < end_s], first),
        *_memory(group, replayed, count, end_s),
        *_Group(MEASURED, scenario, offset).events(measured),
    ]
    return _document(scenario, events)


def _recorded(run: MeasuredRun, most: int | None) -> tuple[int, int]:
    """(first, one past the last) of the recorded minibatches, limited to `most` of them."""
    timeline = next(iter(run.recorded.values()), None)
    if timeline is None:
        return 0, 0
    count = timeline.minibatches if most is None else min(timeline.minibatches, most)
    return timeline.first, timeline.first + count


def _document(scenario: Scenario, events: list[Event]) -> dict[str, Any]:
    return {
        "displayTimeUnit": "ms",
        "otherData": {"plan": scenario.config, "schedule": scenario.schedule.name},
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event["ts"])),
    }


def _threads(worker: int) -> tuple[int, int]:
    """Numbers of the threads of a worker: (thread of actions, thread of all-reduces)."""
    return 2 * worker + 1, 2 * worker + 2


def _in_flight(lane: Lane, trains: bool) -> Iterator[tuple[float, int]]:
    """(time in seconds, minibatches in flight from then on) of a worker.

    A minibatch is in flight from the start of its forward pass to the end of its backward pass."""
    changes: dict[tuple[int, int], float] = {}
    for bar in lane.bars:
        if bar.kind == FORWARD:
            changes[bar.action.index, 1] = bar.start_s
        if bar.kind in ((BACKWARD, WEIGHTS) if trains else (FORWARD,)):
            changes[bar.action.index, -1] = bar.end_s
    in_flight = 0
    for (_, change), time_s in sorted(changes.items(), key=lambda entry: (entry[1], entry[0][1])):
        in_flight += change
        yield time_s, in_flight


def _link_process(group: _Group) -> int:
    """Number of the process that shows the links, after those of all servers."""
    return max(group.process(worker) for stage in group.scenario.stages for worker in stage.workers) + 1


def _links(group: _Group, transfers: Sequence[Transfer], first: int = 0) -> Iterator[Event]:
    """The events of the links, one thread for each link."""
    if not transfers:
        return
    process = _link_process(group)
    yield from group.named(process, "links", 2 * process)
    threads = {row: number for number, row in enumerate(sorted({done.whole_row for done in transfers}), start=1)}
    for row, thread in threads.items():
        yield _name("thread_name", process, thread, row)
    for done in transfers:
        yield {
            "name": str(done.number + first),
            "cat": "link",
            "ph": "X",
            **_times(done.start_s, done.end_s),
            "pid": process,
            "tid": threads[done.whole_row],
            "args": {"link": done.whole_row},
        }


def _memory(group: _Group, replayed: SimulatedEvents, minibatches: int, end_s: float | None = None) -> Iterator[Event]:
    """The memory of every worker over time, as counters."""
    for (stage, replica), sizes in memory_over_time(group.scenario, replayed, minibatches).items():
        worker = group.scenario.stages[stage].workers[replica]
        thread = _threads(worker)[0]
        for time_s, size in sizes:
            if end_s is None or time_s <= end_s:
                yield _counter(f"memory of worker {worker}", group.process(worker), thread, time_s, {"bytes": size})


def _complete(bar: Bar, stage: int, process: int, thread: int) -> Event:
    """A bar as a complete event."""
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
    """Start and duration in microseconds, rounded to nanoseconds as viewers do, so that adjacent events do not
    overlap."""
    start, end = round(start_s * 1e9), round(end_s * 1e9)
    return {"ts": start / 1e3, "dur": (end - start) / 1e3}


def _counter(name: str, process: int, thread: int, time_s: float, values: dict[str, int]) -> Event:
    times = {"ts": _times(time_s, time_s)["ts"]}
    return {"name": name, "ph": "C", **times, "pid": process, "tid": thread, "args": values}


def _name(kind: str, process: int, thread: int, value: str | int, field: str = "name") -> Event:
    """A metadata event that names or sorts a process or thread."""
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {field: value}}
