"""Runs a plan on emulated servers of this machine, and compares it with its predictions. docs/evidence/replay.md.

    PYTHONPATH=tests/support python tests/evaluation/replay.py [PLAN] [--seconds 20] [--profile FILE] [--json]

The executor, its messages and its all-reduces are real; links are shaped, and computing is replaced by sleeping as long
as the profile says. The emulation runs in namespaces of its own, which end with it, also after errors and signals; all
temporary files are removed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import emulation
from network_namespaces import OWN_NAMESPACES, check_requirements
from replay_network import Rings, Scaling, network_tree, parts_of, scaling_for, write_folder
from rich import box
from rich.console import Console
from rich.table import Table

from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem import plan_file
from pipeplan.problem.plan_profile import profile_if_found
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation import engine, metrics
from pipeplan.simulation.scenario import Scenario, read_scenario
from pipeplan.util.files import Node, read_document
from pipeplan.util.units import show_time


@dataclass(frozen=True)
class ReplayedStage:
    """Mean times of one stage, in seconds per minibatch of one of its replicas."""

    replicas: int
    predicted_s: float
    """Predicted forward and backward pass, and share of the optimiser's step."""
    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    wait_s: float
    send_s: float

    @property
    def computing_s(self) -> float:
        """Measured forward and backward pass, and share of the optimiser's step."""
        return self.forward_s + self.backward_s + self.update_s

    def busy(self, step_time_s: float) -> float:
        """Share of time for which its replicas compute."""
        return self.computing_s / (self.replicas * step_time_s)

    def predicted_busy(self, step_time_s: float) -> float:
        """Predicted share of time for which its replicas compute, at the plan's step time."""
        return self.predicted_s / (self.replicas * step_time_s)


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay. Times are seconds per minibatch."""

    config: str
    predicted_s: float
    simulated_s: float | None
    """Of the simulation of the same schedule; None without a steady state."""
    measured_s: float
    spread: float
    """Relative standard error of the measured time, from parts of the run."""
    minibatches: int
    """Number of measured minibatches."""
    scaling: Scaling
    stages: tuple[ReplayedStage, ...]
    seconds: float
    """Duration of the replay, including its start and end."""

    @property
    def error(self) -> float:
        """Measured over predicted time, less 1: above 0 the plan is slower than predicted."""
        return self.measured_s / self.predicted_s - 1


LONGEST_ROUND = 240
PARTS = 4
TIMES = ("forward_s", "backward_s", "update_s", "sync_s", "wait_s", "send_s")


@dataclass(frozen=True)
class Window:
    """The measured minibatches, from the end of one to the end of another. Times are of the emulation."""

    first: int
    last: int
    ends_s: tuple[float, ...]
    """Times at which minibatches first … last were finished at the last stage, each `step` apart."""
    step: int
    """Number of minibatches between two of these times."""

    @property
    def step_time_s(self) -> float:
        """Seconds per minibatch, of the emulation."""
        return (self.ends_s[-1] - self.ends_s[0]) / (self.last - self.first)

    @property
    def spread(self) -> float:
        """Relative standard error of the step time, from parts of the window; 0 where there are too few."""
        count = len(self.ends_s) - 1
        parts = min(PARTS, count)
        if parts < 2:
            return 0.0
        marks = [self.ends_s[number * count // parts] for number in range(parts + 1)]
        sizes = [(number + 1) * count // parts - number * count // parts for number in range(parts)]
        step_times = [(marks[n + 1] - marks[n]) / (sizes[n] * self.step) for n in range(parts)]
        return statistics.stdev(step_times) / math.sqrt(parts) / self.step_time_s


def round_of(scenario: Scenario) -> int:
    """Number of minibatches after which the turns of all replicas repeat."""
    length = math.lcm(scenario.accumulate or 1, *(stage.replicas for stage in scenario.stages))
    last = math.lcm(scenario.accumulate or 1, scenario.stages[-1].replicas)
    return length if length <= LONGEST_ROUND else last


def warm_up(scenario: Scenario) -> int:
    """Number of minibatches until the first stage no longer runs ahead."""
    if scenario.drains and scenario.accumulate:
        return 2 * scenario.accumulate
    return (3 if len(scenario.stages) > 1 else 1) * scenario.in_flight


def window_of(scenario: Scenario, steps: Sequence[dict[str, Any]], minibatches: int) -> Window:
    """The steady part of a run, from the lines of its metrics. Raises `InputError` where there is none."""
    last_stage = len(scenario.stages) - 1
    ends = {step["minibatch"]: step["time_s"] for step in steps if step["stage"] == last_stage}
    length = round_of(scenario)
    last = minibatches - 1 - (0 if scenario.drains else min(scenario.in_flight, minibatches // 10))
    count = (last - warm_up(scenario)) // length
    if count < 1:
        raise InputError(f"{minibatches} minibatches are too few for a steady state: give more --seconds")
    marks = [last - number * length for number in range(count, -1, -1)]
    return Window(marks[0], marks[-1], tuple(ends[mark] for mark in marks), length)


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of all workers' metrics."""
    return [
        json.loads(line) for path in sorted((run / "metrics").glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def stage_times(
    scenario: Scenario, steps: Sequence[dict[str, Any]], window: Window, scaling: Scaling
) -> tuple[ReplayedStage, ...]:
    """The mean times of each stage."""
    times = []
    for index, load in enumerate(scenario.stages):
        mine = [step for step in steps if step["stage"] == index and window.first < step["minibatch"] <= window.last]
        means = {name: sum(step[name] for step in mine) / len(mine) / scaling.time_by for name in TIMES}
        times.append(ReplayedStage(load.replicas, load.busy_s, **means))
    return tuple(times)


WORKERS_A_CORE = 32
"""Most workers per core. With more, their own work dominates the measurement although their stages sleep."""
MOST_MINIBATCHES = 20_000
LEAST_ROUNDS = 2
SECONDS = 20.0
STARTING_S = 60.0
WRONG, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class PreparedReplay:
    """The plan of a plan folder, with the parameters of its emulation."""

    folder: Path
    root: Node
    """The content of plan.json."""
    profile: Profile | None
    plan: Scenario
    rings: Rings
    scaling: Scaling
    minibatches: int

    @property
    def training_s(self) -> float:
        """Predicted seconds of the emulated training."""
        return self.minibatches * self.plan.predicted_s * self.scaling.time_by

    def order(self, scratch: Path, limit_s: float) -> dict[str, Any]:
        """Write the emulated plan into a folder, and return the order to run it."""
        write_folder(self.folder, self.root, self.profile, self.scaling, self.rings, self.minibatches, scratch / "plan")
        return {
            "plan": str(scratch / "plan"),
            "network": network_tree(self.rings.servers, self.scaling),
            "arguments": ["--epochs", "1", "--threads", "1", "--run-dir", str(scratch / "run"), "--log-every", "0"],
            "limit_s": limit_s,
        }


def prepare_replay(folder: Path, profile: Profile | None, seconds: float) -> PreparedReplay:
    """Prepare a replay of so many seconds of training, or more if a steady state needs them.

    Raises `InputError` where the folder has no plan, or the plan has too many workers for this machine.
    """
    plan = read_scenario(folder)
    root = read_document(folder / "plan.json", plan_file.PLAN_FORMAT, plan_file.PLAN_VERSION)
    plan = replace(plan, predicted_s=plan_file.PlanFile.of(root).step_s)
    cluster = cluster_from_json(root["cluster"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cluster.workers > WORKERS_A_CORE * cores:
        raise InputError(
            f"the cluster has {cluster.workers} workers, and this machine can emulate {WORKERS_A_CORE * cores}, "
            f"{WORKERS_A_CORE} for each core; replay a plan for fewer --servers"
        )
    planned = Plan.from_json(root["plan"])
    rings = Rings(planned, cluster, parts_of(cluster, {one for stage in planned.stages for one in stage.workers}))
    scaling = scaling_for(plan, [rings.inflation(index) for index in range(len(plan.stages))])
    return PreparedReplay(folder, root, profile, plan, rings, scaling, _minibatches(plan, seconds / scaling.time_by))


def _minibatches(plan: Scenario, seconds: float) -> int:
    """The number of minibatches in so many seconds at the predicted step time, but enough for a steady state."""
    length = round_of(plan)
    spare = warm_up(plan) + plan.in_flight
    wanted = max(seconds / plan.predicted_s, (spare + LEAST_ROUNDS * length) * 1.2)
    return min(max(math.ceil(wanted / length) * length, length), MOST_MINIBATCHES)


def replay_plan(folder: Path, profile: Profile | None, seconds: float = SECONDS) -> ReplayResult:
    """Replay the plan in a plan folder, whose layers `profile` describes (None: each stage is one layer).

    Raises `InputError` where there is no plan, this machine cannot replay it, or the replay fails.
    """
    ready = prepare_replay(folder, profile, seconds)
    check_requirements()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipeplan-replay-", ignore_cleanup_errors=True) as made:
        scratch = Path(made)
        limit_s = STARTING_S + 5 * max(seconds, ready.training_s)
        result = run_order(ready.order(scratch, limit_s), scratch)
        if result["late"]:
            raise InputError(
                f"the replay took longer than {limit_s:.0f} s, for {ready.training_s:.0f} s of training: "
                "run it again when this machine has less to do, or with other --seconds"
            )
        if any(result["statuses"]):
            raise InputError(f"the replayed workers failed: {last_line(scratch / 'log.txt')}")
        return _measured(ready, scratch, began)


def _measured(ready: PreparedReplay, scratch: Path, began: float) -> ReplayResult:
    plan, scaling = ready.plan, ready.scaling
    steps = read_steps(scratch / "run")
    window = window_of(plan, steps, ready.minibatches)
    steady = metrics.summarise_simulation(
        plan, engine.simulate_schedule(plan, ready.minibatches), ready.minibatches
    ).steady
    return ReplayResult(
        config=plan.config,
        predicted_s=plan.predicted_s,
        simulated_s=None if steady is None else steady.step_time_s,
        measured_s=window.step_time_s / scaling.time_by,
        spread=window.spread,
        minibatches=window.last - window.first,
        scaling=scaling,
        stages=stage_times(plan, steps, window, scaling),
        seconds=time.monotonic() - began,
    )


def run_order(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run an order and return its result, after all of its processes have ended.

    Raises `InputError` with the first error that was printed inside.
    """
    path, log, out = folder / "order.json", folder / "log.txt", folder / "result.json"
    path.write_text(json.dumps(order | {"out": str(out)}))
    command = [*OWN_NAMESPACES, sys.executable, emulation.__file__, str(path)]
    # torch creates a temporary folder and does not remove it.
    modules = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "TMPDIR": str(folder), "PYTHONPATH": modules}
    with log.open("w") as file:
        # The emulation ends when this end of the pipe closes, which also happens if this process is killed.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    if status or not out.is_file():
        raise InputError(f"the replay failed: {last_line(log)}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def last_line(log: Path) -> str:
    """The last error in a log, or its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no message"])[-1]


def show_replay(replayed: ReplayResult, console: Console) -> None:
    """Print the result of a replay."""
    simulated = f", simulated {show_time(replayed.simulated_s)}" if replayed.simulated_s is not None else ""
    console.print(
        f"Plan {replayed.config}: predicted {show_time(replayed.predicted_s)} a minibatch{simulated}, replayed "
        f"{show_time(replayed.measured_s)} ± {replayed.spread:.1%} over {replayed.minibatches} minibatches: "
        f"{replayed.error:+.1%}.\nBytes are divided by {replayed.scaling.bytes_by:.0f}, times stretched by "
        f"{replayed.scaling.time_by:.3g}; {replayed.seconds:.0f} s in all.\n",
        soft_wrap=True,
    )
    table = Table("stage", box=box.SIMPLE, pad_edge=False, show_edge=False)
    for name in ("repl.", "computes", "pred.", "sync", "waits", "sends", "busy", "pred."):
        table.add_column(name, justify="right", no_wrap=True)
    for number, stage in enumerate(replayed.stages, 1):
        times = [stage.computing_s, stage.predicted_s, stage.sync_s, stage.wait_s, stage.send_s]
        busy = f"{stage.busy(replayed.measured_s):.0%}", f"{stage.predicted_busy(replayed.predicted_s):.0%}"
        table.add_row(str(number), str(stage.replicas), *map(show_time, times), *busy)
    console.print(table)


def _end(number: int, _frame: FrameType | None) -> None:
    """End with an exception, so that the folder is removed."""
    raise SystemExit(128 + number)


def main(words: list[str]) -> None:
    """Replay a plan and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, nargs="?", default=Path("plan"))
    parser.add_argument("--profile", type=Path, help="the profile that the plan was made from")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of the run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    path, root = plan_file.plan_file(given.plan), plan_file.read_plan_document(given.plan)
    layers = profile_if_found(root, path, given.profile)  # without it, each stage is replayed as one layer
    replayed = replay_plan(given.plan, layers, given.seconds)
    if given.json:
        print(json.dumps(asdict(replayed) | {"error": replayed.error}, indent=1))
    else:
        show_replay(replayed, Console(highlight=False, markup=False))


if __name__ == "__main__":
    for terminating in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(terminating, _end)
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(WRONG)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
