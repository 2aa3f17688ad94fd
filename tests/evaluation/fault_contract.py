"""Faults, the executor's promises about them, and the check whether a replay kept them.

A fault is written `kill:worker3@20`, `cut:server1` or `flap:server1:3s@5s`. The promises are in docs/running.md,
"Faults and restarts". Times are seconds of the emulation, including `--timeout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OF_WORKERS, OF_CABLES = ("kill", "freeze"), ("cut", "flap")
KINDS = (*OF_CABLES, *OF_WORKERS)


@dataclass(frozen=True)
class Fault:
    """A fault in a replay, and its moment. Times are seconds of the emulation."""

    kind: str
    target: str
    """`worker 3`, or the name of a cable's `NetworkPart`."""
    worker: int | None = None
    lasts_s: float | None = None
    """Duration of a flap."""
    after_minibatches: int | None = None
    after_s: float | None = None
    """Seconds after the first minibatch. If neither moment is given, the replay chooses one."""

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f" of {self.lasts_s:g} s"
        return f"{self.kind}{lasts} of {self.target}" if self.kind != "flap" else f"flap{lasts} at {self.target}"

    def order(self) -> dict[str, Any]:
        """The fault in the order for the emulation."""
        cable = None if self.kind in OF_WORKERS else self.target
        when = {"after_minibatches": self.after_minibatches, "after_s": self.after_s}
        return {"kind": self.kind, "worker": self.worker, "cable": cable, "lasts_s": self.lasts_s} | when


FORMAT, VERSION = "pipeplan-fault-replay", 1
AT_ONCE_S = 2.0
"""Time limit of reactions that take a tenth of a second on an idle machine."""
LOOKING_S = 3.0
"""Time limit of a launcher's search for stopped workers, which it repeats every second."""
ENDING_S = 30.0
"""Seconds that torchrun gives workers to end."""
FROZEN_SHARE = 0.9
"""Share of the timeout after which a launcher ends a stopped worker."""


@dataclass(frozen=True)
class ExpectedReplay:
    """A replay with a fault, and the expected course of events."""

    config: str
    fault: Fault
    timeout_s: float
    restarts: int
    """Most restarts that the launchers make."""
    minibatches: int
    last_stage: int
    longest_s: float
    """Longest time for which a worker waits without a fault."""

    @property
    def heals(self) -> bool:
        """Whether the fault must pass without a restart. A connection doubles its waiting time with every attempt."""
        lasts = self.fault.lasts_s
        return lasts is not None and 2 * lasts < self.timeout_s

    @property
    def may_heal(self) -> bool:
        """Whether the fault may pass without a restart."""
        lasts = self.fault.lasts_s
        return lasts is not None and lasts < self.timeout_s

    @property
    def promised(self) -> str:
        """The promise in words."""
        on = "all workers start again from the last checkpoint, and train to the end"
        if self.fault.kind == "kill":
            return f"noticed at once, or in the middle of a message within the timeout of {self.timeout_s:g} s; {on}"
        if self.fault.kind == "freeze":
            return f"noticed within {FROZEN_SHARE:g} of the timeout of {self.timeout_s:g} s; {on}"
        if self.fault.kind == "cut":
            return f"noticed within the timeout of {self.timeout_s:g} s; with nobody back, an error and the end"
        if self.heals:
            return f"shorter than the timeout of {self.timeout_s:g} s: it heals, without a restart"
        if self.may_heal:
            return f"about as long as the timeout of {self.timeout_s:g} s: it heals, or {on}"
        return f"longer than the timeout of {self.timeout_s:g} s: {on}"


@dataclass(frozen=True)
class FaultReplayed:
    """The result of a replay with a fault."""

    config: str
    fault: str
    timeout_s: float
    minibatches: int
    time_by: float
    """Factor on the times of minibatches."""
    promised: str
    struck_after: int
    """Number of minibatches before the fault."""
    noticed_s: float | None
    """Seconds until the first worker ended that the fault did not end itself; None where none did."""
    all_ended_s: float | None
    """Seconds until the last worker of that attempt ended."""
    back_s: float | None
    """Seconds until the first minibatch after a restart, or after the link was back, was finished."""
    over_s: float | None
    """Seconds until the launchers ended, where they gave up."""
    restarts: int
    done: int
    """Number of finished minibatches, each counted once."""
    statuses: tuple[int | None, ...]
    """Exit statuses of the launchers, by server; None for a launcher that had to be killed."""
    said: tuple[str, ...]
    """Messages of the launchers and workers about the fault."""
    broken: tuple[str, ...]
    """Promises that were not kept."""
    seconds: float

    @property
    def kept(self) -> bool:
        """Whether everything happened as promised."""
        return not self.broken

    def to_json(self) -> dict[str, Any]:
        """The JSON document."""
        return {"format": FORMAT, "version": VERSION} | asdict(self) | {"kept": self.kept}


def judge_fault_replay(
    expected: ExpectedReplay, outcome: dict[str, Any], steps: Sequence[dict[str, Any]], time_by: float, seconds: float
) -> FaultReplayed:
    """Judge a replay by the events of the emulation (`fault_injection`) and the run's
    metrics."""
    struck = outcome["struck_s"]
    first = _first_attempt(outcome, expected)
    ends = sorted(life["ended_s"] for life in first if life["ended_s"] is not None)
    restarts = max(Counter(life["rank"] for life in outcome["workers"]).values(), default=1) - 1
    gave_up = any(outcome["statuses"]) or None in outcome["statuses"]
    over = max((ended_s for ended_s in outcome["ended_s"] if ended_s is not None), default=None) if gave_up else None
    numbers = [step["minibatch"] for step in steps if step["stage"] == expected.last_stage]
    noticed = ends[0] - struck if ends and struck and (restarts or gave_up) else None
    ended = ends[-1] - struck if noticed is not None and len(ends) == len(first) else None
    result = FaultReplayed(
        config=expected.config,
        fault=str(expected.fault),
        timeout_s=expected.timeout_s,
        minibatches=expected.minibatches,
        time_by=time_by,
        promised=expected.promised,
        struck_after=outcome["struck_after"] or 0,
        noticed_s=noticed,
        all_ended_s=ended,
        back_s=_back_s(expected, outcome, steps, struck + ended if ended is not None else outcome["healed_s"]),
        over_s=over - struck if over is not None and struck is not None else None,
        restarts=restarts,
        done=len(set(numbers)),
        statuses=tuple(outcome["statuses"]),
        said=tuple(dict.fromkeys(line["text"] for line in outcome["lines"] if _is_of_fault(line["text"]))),
        broken=(),
        seconds=seconds,
    )
    return FaultReplayed(**asdict(result) | {"broken": tuple(_broken(expected, result, struck, len(numbers)))})


def _first_attempt(outcome: dict[str, Any], expected: ExpectedReplay) -> list[dict[str, Any]]:
    """The worker processes that were alive when the fault came, except the one that it killed."""
    struck = outcome["struck_s"]
    if struck is None:
        return []
    alive = [
        life
        for life in outcome["workers"]
        if life["began_s"] <= struck and (life["ended_s"] is None or life["ended_s"] >= struck)
    ]
    return [life for life in alive if expected.fault.kind != "kill" or life["rank"] != expected.fault.worker]


def _is_of_fault(text: str) -> bool:
    return text.startswith("error: ") or "; restart " in text


def _back_s(
    expected: ExpectedReplay, outcome: dict[str, Any], steps: Sequence[dict[str, Any]], since: float | None
) -> float | None:
    if since is None or outcome["struck_s"] is None:
        return None
    times = [step["time_s"] for step in steps if step["stage"] == expected.last_stage and step["time_s"] > since]
    return min(times) - outcome["struck_s"] if times else None


def _broken(expected: ExpectedReplay, result: FaultReplayed, struck: float | None, lines: int) -> list[str]:
    if struck is None:
        return ["the fault never came: the replay ended before it"]
    broken = []
    if None in result.statuses:
        broken.append("not all launchers ended by themselves")
    if expected.fault.kind == "cut":
        return broken + _broken_by_cut(expected, result)
    if result.done != expected.minibatches or lines != result.done:
        broken.append(f"{result.done} of {expected.minibatches} minibatches were finished, in {lines} lines of metrics")
    if any(result.statuses):
        broken.append(f"the launchers ended with {_listed(result.statuses)}")
    if expected.heals:
        return broken + (["there was a restart"] if result.restarts else [])
    if result.restarts == 0:
        return broken + ([] if expected.may_heal else ["there was no restart"])
    at_once = result.noticed_s is not None and result.noticed_s < AT_ONCE_S
    if result.restarts > (1 if at_once else 2) and expected.fault.kind in OF_WORKERS:
        broken.append(f"there were {result.restarts} restarts")
    latest = _latest_s(expected)
    if result.noticed_s is not None and result.noticed_s > latest:
        broken.append(f"it was noticed after {result.noticed_s:.1f} s, not {latest:.1f} s")
    return broken


def _broken_by_cut(expected: ExpectedReplay, result: FaultReplayed) -> list[str]:
    broken = []
    latest = _latest_s(expected)
    if result.noticed_s is None or result.noticed_s > latest:
        broken.append(f"no worker ended within {latest:.1f} s")
    if result.all_ended_s is None or result.all_ended_s > latest + ENDING_S:
        broken.append(f"not all workers ended within {latest + ENDING_S:.1f} s")
    if not all(result.statuses):
        broken.append(f"the launchers ended with {_listed(result.statuses)}")
    if not any(line.startswith("error: ") for line in result.said):
        broken.append("no error was said")
    return broken


def _latest_s(expected: ExpectedReplay) -> float:
    """Seconds until which the first worker must have noticed the fault."""
    if expected.fault.kind == "freeze":
        return FROZEN_SHARE * expected.timeout_s + LOOKING_S
    return expected.timeout_s + expected.longest_s + AT_ONCE_S


def _listed(statuses: Sequence[int | None]) -> str:
    return ", ".join("no status" if status is None else str(status) for status in statuses)
