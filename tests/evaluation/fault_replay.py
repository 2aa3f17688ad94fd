"""One replay with a fault, such as `kill:worker3@20`, by the launchers that a plan's launch.sh starts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import replay_measure as measure
from fault_contract import KINDS, OF_WORKERS, ExpectedReplay, Fault, FaultReplayed, judge_fault_replay
from network_namespaces import check_requirements
from replay_network import NetworkPart
from replay_run import PreparedReplay, prepare_replay, run_order, working_folder

from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util.text import did_you_mean
from pipeplan.util.units import parse_time

FLAP_S = 3.0
LONGEST_S = 600.0
_EXAMPLES = "kill:worker3, freeze:worker3, cut:server1 or flap:server1:3s, with @20 (minibatches) or @5s after it"
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
) -> FaultReplayed:
    """Replay the plan in a folder with the fault described by `text`.

    Raises `InputError` where the plan cannot have this fault, or this machine cannot replay it.
    """
    ready = prepare_replay(folder, profile, seconds)
    if not ready.plan.schedule.trains:
        raise InputError("faults are replayed for training only: an inference has no checkpoints and starts again")
    workers = sorted(worker for stage in ready.plan.stages for worker in stage.workers)
    fault = _timed(parse_fault(text, workers, ready.servers), ready, seconds)
    timeout_s = _timeout_s(timeout_s, fault, ready)
    check_requirements(processes=True)
    expected = _expected(fault, ready, timeout_s)
    began = time.monotonic()
    with working_folder(keep) as scratch:
        order = _order(ready, expected, scratch) | {"fault": fault.order()}
        result = run_order(order, scratch)
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
        return fault_after(fault, max(1, round(AFTER * ready.minibatches)))
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


def fault_after(fault: Fault, minibatches: int) -> Fault:
    """The fault, after so many minibatches."""
    return replace(fault, after_minibatches=minibatches, after_s=None)


def parse_fault(text: str, active: Sequence[int], servers: NetworkPart) -> Fault:
    """Parse a fault. `active` are the workers of the plan's stages. Raises `InputError` for faults that do not fit."""
    what, at, moment = text.partition("@")
    kind, *rest = what.split(":")
    if kind not in KINDS:
        raise InputError(f"--fault {text}: there is no fault {kind!r}; {did_you_mean(kind, KINDS)}; write {_EXAMPLES}")
    lasts_s = None
    if kind == "flap":
        last = rest.pop() if rest and rest[-1][:1].isdigit() else ""
        lasts_s = _seconds(last, text) if last else FLAP_S
    if len(rest) > 1 or (rest and not rest[0]):
        raise InputError(f"--fault {text}: expected {_EXAMPLES}")
    after_minibatches, after_s = _moment(moment, text) if at else (None, None)
    when = {"lasts_s": lasts_s, "after_minibatches": after_minibatches, "after_s": after_s}
    if kind in OF_WORKERS:
        worker = _worker(rest[0], active, text) if rest else max(active)
        return Fault(kind, f"worker {worker}", worker, **when)  # type: ignore[arg-type]
    return Fault(kind, _cable(rest[0] if rest else "", servers, active, text), None, **when)  # type: ignore[arg-type]


def _moment(text: str, whole: str) -> tuple[int | None, float | None]:
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text), None
    return None, _seconds(text, whole)


def _seconds(text: str, whole: str) -> float:
    try:
        seconds = parse_time(text, "")
    except InputError as error:
        raise InputError(f"--fault {whole}: expected a time such as 3s, found {text!r}") from error
    if seconds > LONGEST_S:
        raise InputError(f"--fault {whole}: {text} is too long: give at most {LONGEST_S:g} s")
    return seconds


def _worker(name: str, active: Sequence[int], whole: str) -> int:
    match = re.fullmatch(r"(?:worker|rank)?[ -]?([0-9]{1,9})", name)
    if match is None or int(match[1]) not in active:
        raise InputError(
            f"--fault {whole}: no stage of the plan is on {name!r}; its stages are on workers {_range(active)}"
        )
    return int(match[1])


def _range(workers: Sequence[int]) -> str:
    numbers = sorted(workers)
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _cable(name: str, servers: NetworkPart, active: Sequence[int], whole: str) -> str:
    """The name of the part that the cable joins to the others."""
    cables = {_plain(part.name): part.name for part in _below(servers)}
    if len(cables) < 2:
        raise InputError(f"--fault {whole}: all workers are behind one link, so that cutting it separates none of them")
    if not name:
        ends = [part for part in _below(servers) if max(active) in part.workers]
        return ends[-1].name
    if _plain(name) not in cables:
        raise InputError(f"--fault {whole}: there is no link of {name!r}; {did_you_mean(_plain(name), cables)}")
    return cables[_plain(name)]


def _below(part: NetworkPart) -> list[NetworkPart]:
    """The parts that are joined to the rest by a cable, shaped or not."""
    return [one for below in part.below for one in (below, *_below(below))]


def _plain(name: str) -> str:
    return name.replace(" ", "").lower()
