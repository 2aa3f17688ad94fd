"""One replay with a fault, by the launchers that a plan's launch.sh starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.replay import faults, measure, requirements
from pipeplan.replay.fault_contract import ExpectedReplay, FaultReplayed, judge_fault_replay
from pipeplan.replay.faults import Fault
from pipeplan.replay.process import run_order, working_folder
from pipeplan.replay.run import PreparedReplay, prepare_replay

LEAST_TIMEOUT_S = 10.0
STARTING_S = 2.0
"""Seconds to start one worker where all share this machine's cores; the workers of a rendezvous start one by one."""
CHECKPOINTS = 8
AFTER = 0.3
"""Share of the minibatches after which a fault comes, by default."""
RESTARTS, RESTARTS_OF_A_CUT = 3, 1


def replay_fault(
    folder: Path,
    profile: Profile | None,
    text: str,
    seconds: float,
    timeout_s: float | None = None,
    keep: Path | None = None,
    watch: Callable[[Path, PreparedReplay], None] = lambda scratch, prepared: None,
) -> FaultReplayed:
    """Replay the plan in a folder with the fault described by `text`.

    Raises `InputError` where the plan cannot have this fault, or this machine cannot replay it.
    """
    ready = prepare_replay(folder, profile, seconds)
    if not ready.plan.schedule.trains:
        raise InputError("faults are replayed for training only: an inference has no checkpoints and starts again")
    workers = sorted(worker for stage in ready.plan.stages for worker in stage.workers)
    fault = _timed(faults.parse_fault(text, workers, ready.servers), ready, seconds)
    timeout_s = _timeout_s(timeout_s, fault, ready)
    requirements.check_requirements(processes=True)
    expected = _expected(fault, ready, timeout_s)
    began = time.monotonic()
    with working_folder(keep) as scratch:
        order = _order(ready, expected, scratch) | {"fault": fault.order()}
        result = run_order(order, scratch, lambda: watch(scratch, ready))
        steps = measure.read_steps(scratch / "run")
        return judge_fault_replay(expected, result, steps, ready.scaling.time_by, time.monotonic() - began)


def _expected(fault: Fault, ready: PreparedReplay, timeout_s: float) -> ExpectedReplay:
    return ExpectedReplay(
        config=ready.plan.config,
        fault=fault,
        timeout_s=timeout_s,
        restarts=RESTARTS_OF_A_CUT if fault.kind == "cut" else RESTARTS,
        minibatches=ready.minibatches,
        last_stage=len(ready.plan.stages) - 1,
        longest_s=_longest_s(ready),
    )


def _order(ready: PreparedReplay, expected: ExpectedReplay, scratch: Path) -> dict[str, Any]:
    group = ready.plan.accumulate or 1
    every = math.ceil(max(ready.minibatches / CHECKPOINTS, measure.round_of(ready.plan)) / group) * group
    options = ["--log-every", "1", "--timeout", f"{expected.timeout_s:g}", "--restarts", str(expected.restarts)]
    if every < ready.minibatches:
        options += ["--checkpoint-minibatches", str(every)]
    starts = (expected.restarts + 1) * (30 + expected.timeout_s + 2 * STARTING_S * _world(ready))
    return ready.order(scratch, starts + 60 + 5 * ready.minibatches * ready.pace_s, options)


def _world(ready: PreparedReplay) -> int:
    return sum(len(part.workers) for part in ready.servers.leaves)


def _timed(fault: Fault, ready: PreparedReplay, seconds: float) -> Fault:
    """The fault at a moment at which the replay still trains. Raises `InputError` for a later moment."""
    if fault.after_minibatches is None and fault.after_s is None:
        return faults.fault_after(fault, max(1, round(AFTER * ready.minibatches)))
    length_s = ready.minibatches * ready.pace_s
    if (fault.after_minibatches or 0) >= ready.minibatches or (fault.after_s or 0.0) >= 0.9 * length_s:
        raise InputError(
            f"the fault would come after the end: {ready.minibatches} minibatches are replayed, in {length_s:.0f} s or "
            f"more; give --seconds more than {seconds:g}"
        )
    return fault


def _timeout_s(given: float | None, fault: Fault, ready: PreparedReplay) -> float:
    least = 2 * _longest_s(ready) + 1
    if given is None:
        return max(LEAST_TIMEOUT_S, STARTING_S * _world(ready), math.ceil(2 * least), 3 * (fault.lasts_s or 0.0))
    if given < least:
        raise InputError(
            f"--timeout {given:g}: workers may wait for each other for up to {least / 2:.1f} s in this replay; "
            f"give {math.ceil(least)} or more"
        )
    return given


def _longest_s(ready: PreparedReplay) -> float:
    """The longest time of a minibatch or an all-reduce of any stage, in seconds of the emulation."""
    longest = max(stage.forward_s + stage.backward_s + stage.sync_s for stage in ready.plan.stages)
    round_s = max(stage.replicas for stage in ready.plan.stages) * ready.plan.predicted_s
    return max(longest, round_s) * ready.scaling.time_by
