"""One replay, from the plan folder to its measurements. All temporary files are removed.

The emulation runs in namespaces of its own, which end with it, also after errors and signals.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import emulation
import replay_measure as measure
from network_namespaces import OWN_NAMESPACES, check_requirements
from replay_cause import replay_cause
from replay_folder import write_folder
from replay_measure import ReplayResult
from replay_network import (
    NetworkPart,
    Rings,
    Scaling,
    network_tree,
    parts_of,
    scaling_for,
    unshaped_levels,
    with_predictions,
)

from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.plan_file import PlanFile
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation import engine, metrics, scenario
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.files import Node, read_document

WORKERS_A_CORE = 32
"""Most workers per core. With more, their own work dominates the measurement although their stages sleep."""
MOST_MINIBATCHES = 20_000
LEAST_ROUNDS = 2
SECONDS = 20.0
STARTING_S = 60.0


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
    def servers(self) -> NetworkPart:
        """The tree of switches and cables."""
        return self.rings.servers

    @property
    def pace_s(self) -> float:
        """Predicted seconds per minibatch, of the emulation."""
        return self.plan.predicted_s * self.scaling.time_by

    def order(self, scratch: Path, limit_s: float, options: Sequence[str]) -> dict[str, Any]:
        """Write the emulated plan into a folder, and return the order to run it, with options for the workers."""
        write_folder(self.folder, self.root, self.profile, self.scaling, self.rings, self.minibatches, scratch / "plan")
        return {
            "plan": str(scratch / "plan"),
            "network": network_tree(self.servers, self.scaling),
            "arguments": ["--epochs", "1", "--threads", "1", "--run-dir", str(scratch / "run"), *options],
            "limit_s": limit_s,
        }


def prepare_replay(folder: Path, profile: Profile | None, seconds: float) -> PreparedReplay:
    """Prepare a replay of so many seconds of training, or more if a steady state needs them.

    Raises `InputError` where the folder has no plan, or the plan has too many workers for this machine.
    """
    plan = scenario.read_scenario(folder)
    root = read_document(folder / "plan.json", scenario.FORMAT, scenario.VERSION)
    plan = replace(plan, predicted_s=PlanFile.of(root).step_s)
    cluster = cluster_from_json(root["cluster"])
    _check_size(cluster.workers)
    planned = Plan.from_json(root["plan"])
    rings = Rings(planned, cluster, parts_of(cluster, {one for stage in planned.stages for one in stage.workers}))
    scaling = scaling_for(plan, [rings.inflation(index) for index in range(len(plan.stages))])
    count = _minibatches(plan, seconds / scaling.time_by)
    return PreparedReplay(folder, root, profile, plan, rings, scaling, count)


def _check_size(workers: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > WORKERS_A_CORE * cores:
        raise InputError(
            f"the cluster has {workers} workers, and this machine can emulate {WORKERS_A_CORE * cores}, "
            f"{WORKERS_A_CORE} for each core; replay a plan for fewer --servers"
        )


def _minibatches(plan: Scenario, seconds: float) -> int:
    """The number of minibatches in so many seconds at the predicted pace, but enough for a steady state."""
    length = measure.round_of(plan)
    spare = measure.warm_up(plan) + plan.in_flight
    wanted = max(seconds / plan.predicted_s, (spare + LEAST_ROUNDS * length) * 1.2)
    whole = math.ceil(wanted / length) * length
    return min(max(whole, length), MOST_MINIBATCHES)


@dataclass(frozen=True)
class ReplaySettings:
    """Options of a replay."""

    seconds: float = SECONDS
    """Seconds of training, in addition to the start of the workers."""
    keep: Path | None = None
    """Folder for the files of the replay, which are removed otherwise."""


def replay_plan(
    folder: Path,
    profile: Profile | None,
    settings: ReplaySettings | None = None,
) -> ReplayResult:
    """Replay the plan in a plan folder, whose layers `profile` describes (None: each stage is one layer).

    Raises `InputError` where there is no plan, this
    machine cannot replay it, or the replay fails.
    """
    settings = settings or ReplaySettings()
    ready = prepare_replay(folder, profile, settings.seconds)
    check_requirements()
    began = time.monotonic()
    with working_folder(settings.keep) as scratch:
        limit_s = STARTING_S + 5 * max(settings.seconds, ready.minibatches * ready.pace_s)
        order = ready.order(scratch, limit_s, ["--log-every", "0"])
        result = run_order(order, scratch)
        if result["late"]:
            raise InputError(
                f"the replay took longer than {limit_s:.0f} s, for {ready.minibatches * ready.pace_s:.0f} s of "
                "training: run it again when this machine has less to do, or with other --seconds"
            )
        if any(result["statuses"]):
            raise InputError(f"the replayed workers failed: {last_line(scratch / 'log.txt')}")
        return _measured(ready, result, scratch, began)


def _measured(ready: PreparedReplay, result: dict[str, Any], scratch: Path, began: float) -> ReplayResult:
    plan, scaling = ready.plan, ready.scaling
    steps = measure.read_steps(scratch / "run")
    window = measure.window_of(plan, steps, ready.minibatches)
    replayed = ReplayResult(
        config=plan.config,
        predicted_s=plan.predicted_s,
        simulated_s=_simulated_s(plan, ready.minibatches),
        measured_s=window.pace_s / scaling.time_by,
        spread=window.spread,
        minibatches=window.last - window.first,
        scaling=scaling,
        stages=measure.stage_times(plan, steps, window, scaling),
        links=with_predictions(
            measure.link_uses(ready.servers, result["traffic"], window, scaling), ready.servers, ready.root
        ),
        seconds=time.monotonic() - began,
        cores_busy=measure.cores_busy(result["cores"], window),
        unshaped=unshaped_levels(cluster_from_json(ready.root["cluster"]), ready.servers),
    )
    return replace(replayed, cause=replay_cause(replayed))


def _simulated_s(plan: Scenario, count: int) -> float | None:
    steady = metrics.summarise_simulation(plan, engine.simulate_schedule(plan, count), count).steady
    return None if steady is None else steady.pace_s


@contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """A working folder that is removed afterwards, or the folder `keep`, which stays.

    Raises `InputError` where `keep` is not empty or cannot be created.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="pipeplan-replay-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise InputError(f"{keep} has something in it: --keep needs a new folder, or an empty one")
    except OSError as error:
        raise InputError(
            f"{keep} cannot be used: {error.strerror or error}; choose another folder for --keep"
        ) from error
    yield keep.absolute()


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
    with log.open("w") as file, _terminated_like_interrupted():
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
    """The first error in a log, or its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no message"])[-1]


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM and SIGHUP, which would otherwise end this process without removing its folder."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, usual in before.items():
        if usual == signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
