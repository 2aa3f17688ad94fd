"""One replay, from the plan folder to its measurements. All temporary files are removed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.cluster_json import from_json
from pipeplan.emulate import machine, measured, predicted
from pipeplan.emulate.carry import carry_out, last_line, scratch
from pipeplan.emulate.cause import first_cause
from pipeplan.emulate.outcome import Replayed
from pipeplan.emulate.prepared import Prepared, prepare
from pipeplan.errors import InputError
from pipeplan.profile_data import Profile
from pipeplan.simulation import engine, report
from pipeplan.simulation.scenario import Scenario

SECONDS = 20.0
STARTING_S = 60.0


@dataclass(frozen=True)
class Settings:
    """Options of a replay."""

    seconds: float = SECONDS
    """Seconds of training, in addition to the start of the workers."""
    keep: Path | None = None
    """Folder for the files of the replay, which are removed otherwise."""


def replay(
    folder: Path,
    profile: Profile | None,
    settings: Settings | None = None,
    watch: Callable[[Path, Prepared], None] = lambda room, prepared: None,
) -> Replayed:
    """Replay the plan in a plan folder, whose layers `profile` describes (None: each stage is one layer).

    `watch` is called every half second with the working folder. Raises `InputError` where there is no plan, this
    machine cannot replay it, or the replay fails.
    """
    settings = settings or Settings()
    ready = prepare(folder, profile, settings.seconds)
    machine.check()
    began = time.monotonic()
    with scratch(settings.keep) as room:
        limit_s = STARTING_S + 5 * max(settings.seconds, ready.minibatches * ready.pace_s)
        order = ready.order(room, limit_s, ["--log-every", "0"])
        result = carry_out(order, room, lambda: watch(room, ready))
        if result["late"]:
            raise InputError(
                f"the replay took longer than {limit_s:.0f} s, for {ready.minibatches * ready.pace_s:.0f} s of "
                "training: run it again when this machine has less to do, or with other --seconds"
            )
        if any(result["statuses"]):
            raise InputError(f"the replayed workers failed: {last_line(room / 'log.txt')}")
        return _measured(ready, result, room, began)


def _measured(ready: Prepared, result: dict[str, Any], room: Path, began: float) -> Replayed:
    plan, scaling = ready.plan, ready.scaling
    steps = measured.read_steps(room / "run")
    window = measured.window_of(plan, steps, ready.minibatches)
    replayed = Replayed(
        config=plan.config,
        predicted_s=plan.predicted_s,
        simulated_s=_simulated_s(plan, ready.minibatches),
        measured_s=window.pace_s / scaling.time_by,
        spread=window.spread,
        minibatches=window.last - window.first,
        scaling=scaling,
        stages=measured.stage_times(plan, steps, window, scaling),
        links=predicted.beside(
            measured.link_uses(ready.servers, result["traffic"], window, scaling), ready.servers, ready.root
        ),
        seconds=time.monotonic() - began,
        cores_busy=measured.cores_busy(result["cores"], window),
        unshaped=predicted.unshaped(from_json(ready.root["cluster"]), ready.servers),
    )
    return replace(replayed, cause=first_cause(replayed))


def _simulated_s(plan: Scenario, count: int) -> float | None:
    steady = report.measure(plan, engine.replay(plan, count), count).steady
    return None if steady is None else steady.pace_s
