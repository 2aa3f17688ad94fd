"""A replay as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: one process a server, one more for the links.

The format is Google's "Trace Event Format", JSON object form: complete events `X`, counters `C`, metadata `M`; `ts` and
`dur` in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeplan.simulate.engine import Replayed
from pipeplan.simulate.memory import memory_over_time
from pipeplan.simulate.report import in_flight
from pipeplan.simulate.scenario import Scenario
from pipeplan_launch.schedule import Kind

_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.REDUCE: "all-reduce", Kind.UPDATE: "all-reduce"}
_MICROSECONDS = 1e6

Event = dict[str, Any]


def trace_document(scenario: Scenario, replayed: Replayed) -> dict[str, Any]:
    """The whole trace, ready to be written as JSON."""
    events = [
        *_workers(scenario, replayed),
        *_links(scenario, replayed),
        *_counters(scenario, replayed),
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"plan": scenario.config, "schedule": scenario.schedule.name},
        "traceEvents": events,
    }


def _process(scenario: Scenario, worker: int) -> int:
    """Perfetto takes process and thread 0 for idle time: so both count from 1 here."""
    return scenario.server_of(worker) + 1


def _workers(scenario: Scenario, replayed: Replayed) -> Iterator[Event]:
    named = set()
    for stage, load in enumerate(scenario.stages):
        for worker in load.workers:
            process = _process(scenario, worker)
            if process not in named:
                named.add(process)
                yield _name("process_name", process, 0, f"server {process - 1}")
            yield _name("thread_name", process, worker + 1, f"worker {worker}, stage {stage + 1}")
    for stage, replica, action, start, end in replayed.passes:
        worker = scenario.stages[stage].workers[replica]
        counted = "group" if action.kind in (Kind.REDUCE, Kind.UPDATE) else "minibatch"
        yield _complete(str(action), _NAMES[action.kind], _process(scenario, worker), worker + 1, start, end) | {
            "args": {"stage": stage + 1, counted: action.index}
        }


def _links(scenario: Scenario, replayed: Replayed) -> Iterator[Event]:
    """Rows of links, in a process behind those of all servers."""
    if not replayed.transfers:
        return
    process = max(_process(scenario, worker) for stage in scenario.stages for worker in stage.workers) + 1
    yield _name("process_name", process, 0, "links")
    threads = {row: number for number, row in enumerate(sorted({done.row for done in replayed.transfers}), start=1)}
    for row, thread in threads.items():
        yield _name("thread_name", process, thread, row)
    for row, number, start, end in replayed.transfers:
        yield _complete(str(number), "link", process, threads[row], start, end) | {"args": {"link": row}}


def _counters(scenario: Scenario, replayed: Replayed) -> Iterator[Event]:
    """Minibatches in flight and bytes held over time, for every worker."""
    minibatches = sum(done.stage == 0 and done.action.kind is Kind.FORWARD for done in replayed.actions)
    for (stage, replica), sizes in memory_over_time(scenario, replayed, minibatches).items():
        worker = scenario.stages[stage].workers[replica]
        for time_s, size in sizes:
            yield _counter(scenario, f"memory of worker {worker}", worker, time_s, {"bytes": size})
    for (stage, replica), steps in sorted(in_flight(scenario, replayed).items()):
        worker = scenario.stages[stage].workers[replica]
        for time_s, count in steps:
            yield _counter(scenario, f"in flight on worker {worker}", worker, time_s, {"minibatches": count})


def _counter(scenario: Scenario, name: str, worker: int, time_s: float, values: dict[str, int]) -> Event:
    return {
        "name": name,
        "ph": "C",
        "ts": time_s * _MICROSECONDS,
        "pid": _process(scenario, worker),
        "tid": worker + 1,
        "args": values,
    }


def _name(kind: str, process: int, thread: int, text: str) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {"name": text}}


def _complete(name: str, category: str, process: int, thread: int, start_s: float, end_s: float) -> Event:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_s * _MICROSECONDS,
        "dur": (end_s - start_s) * _MICROSECONDS,
        "pid": process,
        "tid": thread,
    }
