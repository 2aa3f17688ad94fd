"""One replay: from the plan folder to what was measured. Everything that is made for it goes with it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.cluster_json import from_json
from pipeplan.emulate import machine, measured
from pipeplan.emulate.folder import write_folder
from pipeplan.emulate.outcome import Replayed
from pipeplan.emulate.scaling import scaling_for
from pipeplan.emulate.servers import network, parts_of
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document
from pipeplan.profile import Profile
from pipeplan.simulate import engine, report, scenario
from pipeplan.simulate.scenario import Scenario
from pipeplan_launch.emulation.network import INSIDE

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
    with _scratch(settings.keep) as scratch:
        return _replay(folder, root, plan, profile, settings, scratch, began)


def _replay(
    folder: Path,
    root: Node,
    plan: Scenario,
    profile: Profile | None,
    settings: Settings,
    scratch: Path,
    began: float,
) -> Replayed:
    servers = parts_of(from_json(root["cluster"]))
    scaling = scaling_for(plan)
    count = _minibatches(plan, settings.seconds / scaling.time_by)
    write_folder(folder, root, profile, scaling, servers, count, scratch / "plan")
    order = {
        "plan": str(scratch / "plan"),
        "network": network(servers, scaling),
        "arguments": ["--epochs", "1", "--threads", "1", "--log-every", "0", "--run-dir", str(scratch / "run")],
        "out": str(scratch / "result.json"),
        "limit_s": STARTING_S + 5 * max(settings.seconds, count * plan.predicted_s * scaling.time_by),
    }
    result = _carry_out(order, scratch)
    steps = measured.read_steps(scratch / "run")
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


@contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="pipeplan-replay-") as folder:
        yield Path(folder)


def _carry_out(order: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Run the workers, and wait for them."""
    path, log = scratch / "order.json", scratch / "log.txt"
    path.write_text(json.dumps(order))
    command = [*INSIDE, sys.executable, "-m", "pipeplan_launch.emulation", str(path)]
    quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=quiet, start_new_session=True
        )
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if status or not Path(order["out"]).is_file():
        raise InputError(f"the replay failed: {_last_line(log)}")
    result: dict[str, Any] = json.loads(Path(order["out"]).read_text())
    if any(result["statuses"]):
        raise InputError(f"the replayed workers failed: {_last_line(log)}")
    return result


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no word of why"])[-1]
