"""Faults and their syntax: `kill:worker3@20`, `cut:server1`, `flap:server1:3s@5s`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.errors import InputError
from pipeplan.replay.emulated_network import NetworkPart
from pipeplan.util.text import did_you_mean
from pipeplan.util.units import parse_time

OF_WORKERS, OF_CABLES = ("kill", "freeze"), ("cut", "flap")
KINDS = (*OF_CABLES, *OF_WORKERS)
FLAP_S = 3.0
LONGEST_S = 600.0
_EXAMPLES = "kill:worker3, freeze:worker3, cut:server1 or flap:server1:3s, with @20 (minibatches) or @5s after it"


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
