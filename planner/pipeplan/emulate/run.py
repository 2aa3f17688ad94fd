"""One replay: from the plan folder to what was measured. Everything that is made for it goes with it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from pipeplan.cluster_json import from_json
from pipeplan.emulate import machine, measured
from pipeplan.emulate.carry import carry_out, last_line, scratch
from pipeplan.emulate.folder import write_folder
from pipeplan.emulate.outcome import Replayed
from pipeplan.emulate.scaling import scaling_for
from pipeplan.emulate.servers import network, parts_of
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document
from pipeplan.profile import Profile
from pipeplan.simulate import engine, report, scenario
from pipeplan.simulate.scenario import Scenario

SECONDS = 20.0
MOST_MINIBATCHES = 20_000
STARTING_S = 60.0
LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Settings:
    """How a plan is replayed."""

    seconds: float = SECONDS
    """Of training; starting the workers comes on top."""
    keep: Path | None = None
    """A folder for what the replay works with, which else is removed."""


def replay(folder: Path, profile: Profile | None, settings: Settings | None = None) -> Replayed:
    """Replay the plan in a plan folder, whose layers `profile` describes (None: each stage is one layer).

    Raises `InputError` where this machine cannot, or the plan is none.
    """
    settings = settings or Settings()
    plan = scenario.read(folder)
    machine.check()
    root = read_document(folder / "plan.json", scenario.FORMAT, scenario.VERSION)
    began = time.monotonic()
    with scratch(settings.keep) as room:
        return _replay(folder, root, plan, profile, settings, room, began)


def _replay(
    folder: Path,
    root: Node,
    plan: Scenario,
    profile: Profile | None,
    settings: Settings,
    room: Path,
    began: float,
) -> Replayed:
    servers = parts_of(from_json(root["cluster"]))
    scaling = scaling_for(plan)
    count = _minibatches(plan, settings.seconds / scaling.time_by)
    write_folder(folder, root, profile, scaling, servers, count, room / "plan")
    order = {
        "plan": str(room / "plan"),
        "network": network(servers, scaling),
        "arguments": ["--epochs", "1", "--threads", "1", "--log-every", "0", "--run-dir", str(room / "run")],
        "limit_s": STARTING_S + 5 * max(settings.seconds, count * plan.predicted_s * scaling.time_by),
    }
    result = carry_out(order, room, lambda: None)
    if any(result["statuses"]):
        raise InputError(f"the replayed workers failed: {last_line(room / 'log.txt')}")
    steps = measured.read_steps(room / "run")
    window = measured.window_of(plan, steps, count)
    return Replayed(
        config=plan.config,
        predicted_s=plan.predicted_s,
        simulated_s=_simulated_s(plan, count),
        measured_s=window.pace_s / scaling.time_by,
        spread=window.spread,
        minibatches=window.last - window.first,
        scaling=scaling,
        stages=measured.stage_times(plan, steps, window, scaling),
        links=tuple(measured.link_uses(servers, result["traffic"], window, scaling)),
        seconds=time.monotonic() - began,
    )


def _minibatches(plan: Scenario, seconds: float) -> int:
    """For so long at the predicted pace, and at least enough for a steady state."""
    length = measured.round_of(plan)
    spare = measured.warm_up(plan) + plan.in_flight
    wanted = max(seconds / plan.predicted_s, (spare + LEAST_ROUNDS * length) * 1.2)
    whole = math.ceil(wanted / length) * length
    return min(max(whole, length), MOST_MINIBATCHES)


def _simulated_s(plan: Scenario, count: int) -> float | None:
    steady = report.measure(plan, engine.replay(plan, count), count).steady
    return None if steady is None else steady.pace_s
