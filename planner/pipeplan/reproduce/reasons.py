"""Why a row's prediction is off: what the experiments showed, and what they leave open."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan import devices
from pipeplan.profile_data import Profile
from pipeplan.reproduce import changes
from pipeplan.reproduce.efficiencies import ALLREDUCE, MESSAGES, Efficiency
from pipeplan.reproduce.experiments import Trial, at_rate
from pipeplan.reproduce.profiles import MEASURED_AT
from pipeplan.reproduce.published import Published, row_of
from pipeplan.reproduce.rows import OFF, Case, Row

FIRST_TAKEN = 64
"""What GNMT's published profiles were first taken to be measured at: the paper's minibatch size."""
ON_ONE, ON_SEVERAL = ("gnmt16-1x4", "gnmt8-1x4"), ("gnmt16-4x4", "gnmt8-3x4")
"""GNMT's rows on cluster A: what one of them needs is tried on the other."""


@dataclass(frozen=True)
class Reason:
    """Of one row."""

    name: str
    text: str
    explained: bool
    """Whether the prediction with what was found is within the limit."""


@dataclass(frozen=True)
class Findings:
    """What reasons are made of."""

    known: Sequence[Efficiency]
    trials: dict[str, Trial]
    profiles: dict[str, Profile]


def reasons(rows: Sequence[Row], findings: Findings) -> list[Reason]:
    """One for every row that is off."""
    return [_BY_ROW.get(row.published.name, _unknown)(row, findings) for row in rows if row.off]


def _within(gain: float, row: Published) -> bool:
    return abs(gain / row.speedup - 1) <= OFF


def _trial(row: Row, findings: Findings) -> Trial:
    return findings.trials[row.published.name]


def _unknown(row: Row, findings: Findings) -> Reason:
    best = _best(_trial(row, findings), row.published)
    return Reason(row.published.name, f"Not looked into; the nearest experiment gives {best:.2f}×.", False)


def _best(trial: Trial, row: Published) -> float:
    return min(trial.gains.values(), key=lambda gain: abs(math.log(gain / row.speedup)))


def _step(row: Row, findings: Findings) -> Reason:
    gain = _trial(row, findings).gains["step"]
    text = (
        f"The last stage, one worker with the linear layers, sets the pace, and steps its optimiser after every"
        f" minibatch. Profiles of PipeDream have no step. With one, in separate kernels as at that time, {gain:.2f}×."
    )
    return Reason(row.published.name, text, _within(gain, row.published))


def _one_server(row: Row, findings: Findings) -> Reason:
    """GNMT on four GPUs of cluster A."""
    published, trial = row.published, _trial(row, findings)
    needs, gain = trial.needs, trial.gains["awaited"]
    text = (
        "By the formulas data parallelism hides its all-reduce behind its backward pass. If it hides nothing,"
        f" {gain:.2f}×."
    )
    if needs.allreduce is None:
        return Reason(published.name, text, _within(gain, published))
    text += (
        f" If it does, PCIe has to carry {needs.allreduce / 1e9:.2f} GB/s for what was published, not"
        f" {needs.allreduce_now / 1e9:g}"
    )
    for other, gain_there in _crossed(published, findings, ON_ONE, ALLREDUCE):
        text += f" (at the rate that {other.name} needs, {gain_there:.2f}×)"
    text += (
        "; that is likely where GPUs cannot read each other's memory and all goes through the host's, as was seen at"
        " Azure (NVIDIA/nccl issue 1214). One published number does not say which of the two it was."
    )
    return Reason(published.name, text, _within(gain, published))


def _several_servers(row: Row, findings: Findings) -> Reason:
    """GNMT on several servers of cluster A."""
    published, trial = row.published, _trial(row, findings)
    needs, profile = trial.needs, findings.profiles[row.published.name]
    parts = []
    if row.source.published and published.profile in MEASURED_AT:
        true = MEASURED_AT[published.profile]
        taken = changes.as_other_minibatch(profile, FIRST_TAKEN, true)
        first, right = Case(published, taken).gain(findings.known), trial.gains["repaired"]
        parts.append(f"Taken to be measured at {FIRST_TAKEN} samples, not {true}, the profile gives {first:.2f}×.")
        verdict = "that is it" if _within(right, published) else "that is not it"
        parts.append(f"With its near-zero backward times put right, {right:.2f}×: {verdict}.")
    parts.append(
        f"With the all-reduce at the nominal rate, {needs.gain_at_nominal:.2f}×; VGG-16 on this cluster has it at"
        f" {needs.allreduce_now / 1e9:.2f} GB/s, half of that. Why it was faster for GNMT is open: only ratios were"
        " published."
    )
    if needs.messages is not None:
        crossed = _crossed(published, findings, ON_SEVERAL, MESSAGES)
        there = " and ".join(f"{gain:.2f}× at the rate that {other.name} needs" for other, gain in crossed)
        parts.append(
            f"Slower messages between servers would do it, too, at {needs.messages / 1e9:.2f} GB/s: each boundary has"
            " one sender, which copies tensors to the host, sends and copies back in turn (runtime/communication.py)"
            + (f"; but not one rate for all: {there}." if there else ".")
        )
    return Reason(published.name, " ".join(parts), _within(needs.gain_at_nominal, published))


def _crossed(row: Published, findings: Findings, names: Sequence[str], operation: str) -> list[tuple[Published, float]]:
    """The row predicted with the rate that each of some other rows needs: a test, as those are not this one."""
    found = []
    for name in names:
        other, trial = row_of(name), findings.trials.get(name)
        if name == row.name or other is None or trial is None:
            continue
        rate = trial.needs.allreduce if operation == ALLREDUCE else trial.needs.messages
        if rate is not None:
            links = at_rate(row, findings.known, operation, rate)
            found.append((other, Case(row, findings.profiles[row.name]).gain(links)))
    return found


def _other_model(row: Row, findings: Findings) -> Reason:
    """AWD-LM and S2VT: no profile was published, nor the model's shape."""
    published, profile = row.published, findings.profiles[row.published.name]
    work = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    speed = row.outcome.problem.cluster.device.speed
    exchange = _exchange(row, findings.known)
    most = longest_work(published.speedup, published.workers, exchange) * speed
    peak = devices.load("v100").peaks["float32"]
    room = row.parallel.pace_s * published.workers * speed / work
    text = (
        f"Not explained. The bundled model computes {work * 1e3:.0f} ms a minibatch on a V100, and by these shares its"
        f" gradients take {exchange * 1e3:.0f} ms of data parallelism, which hides most of them: no pipeline can be"
        f" more than {room:.2f} times faster. For {published.speedup:g}×, even perfectly balanced and with nothing"
        f" hidden, the model must not compute for more than {most * 1e3:.0f} ms, {most * peak / 1e12:.2f} TFLOP at a"
        " V100's peak: what was run did much less with as many weights. Its shape was not published."
    )
    return Reason(published.name, text, False)


def _exchange(row: Row, known: Sequence[Efficiency]) -> float:
    """Seconds of gradient synchronisation that data parallelism spends for each minibatch."""
    return row.parallel.score.stages[0].synchronisation_s


def longest_work(speedup: float, workers: int, exchange_s: float) -> float:
    """The longest compute of a model whose pipeline can be so much faster than data parallelism that hides nothing.

    A pipeline takes at least work / workers, data parallelism work / workers + exchange: their ratio is the speed-up at
    work = workers · exchange / (speedup - 1).
    """
    return workers * exchange_s / (speedup - 1)


_BY_ROW: dict[str, Callable[[Row, Findings], Reason]] = {
    "alexnet-4x4": _step,
    "alexnet-2x8": _step,
    "gnmt16-1x4": _one_server,
    "gnmt8-1x4": _one_server,
    "gnmt16-4x4": _several_servers,
    "gnmt16-2x8": _several_servers,
    "gnmt8-3x4": _several_servers,
    "awd-lm-1x4": _other_model,
    "s2vt-4x1": _other_model,
}
