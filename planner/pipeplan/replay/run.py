"""One replay, from the plan folder to its measurements. All temporary files are removed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.cluster_data.cluster_json import cluster_from_json
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.plan_file import step_time_s
from pipeplan.profile_data.profile import Profile
from pipeplan.replay import measure, predicted_links, requirements
from pipeplan.replay.cause import replay_cause
from pipeplan.replay.emulated_network import NetworkPart, network_tree, parts_of
from pipeplan.replay.outcome import ReplayResult
from pipeplan.replay.plan_folder import write_folder
from pipeplan.replay.predicted_links import Rings
from pipeplan.replay.process import last_line, run_order, working_folder
from pipeplan.replay.scaling import Scaling, scaling_for
from pipeplan.simulation import engine, metrics, scenario
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.files import Node, read_document

WORKERS_A_CORE = 32
"""Most workers per core. With more, their own work dominates the measurement although their stages sleep."""
MOST_MINIBATCHES = 20_000
LEAST_ROUNDS = 2
SECONDS = 20.0
STARTING_S = 60.0
END_BYTES = 4096


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
    plan = replace(plan, predicted_s=step_time_s(root))
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
    watch: Callable[[Path, PreparedReplay], None] = lambda scratch, prepared: None,
) -> ReplayResult:
    """Replay the plan in a plan folder, whose layers `profile` describes (None: each stage is one layer).

    `watch` is called every half second with the working folder. Raises `InputError` where there is no plan, this
    machine cannot replay it, or the replay fails.
    """
    settings = settings or ReplaySettings()
    ready = prepare_replay(folder, profile, settings.seconds)
    requirements.check_requirements()
    began = time.monotonic()
    with working_folder(settings.keep) as scratch:
        limit_s = STARTING_S + 5 * max(settings.seconds, ready.minibatches * ready.pace_s)
        order = ready.order(scratch, limit_s, ["--log-every", "0"])
        result = run_order(order, scratch, lambda: watch(scratch, ready))
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
        links=predicted_links.with_predictions(
            measure.link_uses(ready.servers, result["traffic"], window, scaling), ready.servers, ready.root
        ),
        seconds=time.monotonic() - began,
        cores_busy=measure.cores_busy(result["cores"], window),
        unshaped=predicted_links.unshaped_levels(cluster_from_json(ready.root["cluster"]), ready.servers),
    )
    return replace(replayed, cause=replay_cause(replayed))


def _simulated_s(plan: Scenario, count: int) -> float | None:
    steady = metrics.summarise_simulation(plan, engine.simulate_schedule(plan, count), count).steady
    return None if steady is None else steady.pace_s


def minibatches_done(run: Path) -> int | None:
    """The number of minibatches done by the most advanced worker, from its metrics; None before the first one."""
    numbers = [number for path in run.glob("metrics/*.jsonl") if (number := _last(path)) is not None]
    return max(numbers) + 1 if numbers else None


def _last(path: Path) -> int | None:
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        *lines, _ = file.read().split(b"\n")
        if lines:
            return int(json.loads(lines[-1])["minibatch"])
    return None
