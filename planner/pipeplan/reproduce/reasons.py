"""Why a row's prediction is off: what the experiments showed, and what they leave open."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan import devices
from pipeplan.profile import Profile
from pipeplan.reproduce import changes
from pipeplan.reproduce.efficiencies import Efficiency
from pipeplan.reproduce.experiments import Trial, with_messages
from pipeplan.reproduce.profiles import MEASURED_AT
from pipeplan.reproduce.published import Published, row_of
from pipeplan.reproduce.rows import OFF, Case, Row

FIRST_TAKEN = 64
"""What GNMT's published profiles were first taken to be measured at: the paper's minibatch size."""
CONNECTED = ("gnmt16-4x4", "gnmt16-2x8", "gnmt8-3x4")
"""The straight rows over several servers: at each of their boundaries one worker sends to one."""


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
    """One for every row that is off, and for every one whose plan is not the paper's kind because of its profile."""
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
    trial, needs = _trial(row, findings), _trial(row, findings).needs
    gain = trial.gains["awaited"]
    text = (
        f"By the formulas data parallelism hides its whole all-reduce behind compute. If it awaits it, {gain:.2f}×."
        " The same comes out"
    )
    if needs.allreduce is None:
        return Reason(row.published.name, text + " at no rate of PCIe.", _within(gain, row.published))
    text += (
        f" if it hides all, and PCIe carries {needs.allreduce / 1e9:.2f} GB/s, not {needs.allreduce_now / 1e9:g}: GPUs"
        " of Azure's machines cannot read each other's memory, so that all goes through the host's (NVIDIA/nccl issue"
        " 1214). Which of the two it was, one published number does not say."
    )
    return Reason(row.published.name, text, _within(gain, row.published))


def _several_servers(row: Row, findings: Findings) -> Reason:
    """GNMT on cluster A."""
    published, trial = row.published, _trial(row, findings)
    needs, profile = trial.needs, findings.profiles[row.published.name]
    parts = []
    if row.source.published and published.profile in MEASURED_AT:
        true = MEASURED_AT[published.profile]
        taken = changes.as_other_minibatch(profile, FIRST_TAKEN, true)
        first = Case(published, taken).gain(findings.known)
        parts.append(f"Taken to be measured at {FIRST_TAKEN} samples, not {true}, the profile gives {first:.2f}×.")
        parts.append(
            f"Its near-zero backward times do not matter: put right, {trial.gains['repaired']:.2f}×, as the slowest"
            " stage stays about as slow."
        )
    nominal = f"at the full nominal rate the prediction is {needs.gain_at_nominal:.2f}×"
    if needs.allreduce is None:
        parts.append(
            f"No efficiency of the all-reduce alone explains it: {nominal}. So the pipeline itself was slower."
        )
    else:
        parts.append(
            f"The all-reduce would have to reach {needs.allreduce / 1e9:.2f} GB/s where VGG-16's reached"
            f" {needs.allreduce_now / 1e9:.2f} ({nominal})."
        )
    explained = False
    if needs.messages is not None:
        parts.append(
            f"Or messages ran at {needs.messages / 1e9:.2f} GB/s: one worker sends to one, each tensor copied to the"
            " host, sent and copied back in turn (runtime/communication.py)."
        )
        crossed, explained = _crossed(published, findings)
        parts += crossed
    parts.append("Only the ratio was published, not the paces, so that the two cannot be told apart.")
    return Reason(published.name, " ".join(parts), explained)


def _crossed(row: Published, findings: Findings) -> tuple[list[str], bool]:
    """The row predicted with the rate of messages that another row needs: a test, as that row is not this one."""
    found, within = [], False
    for name in CONNECTED:
        other, trial = row_of(name), findings.trials.get(name)
        if name == row.name or other is None or trial is None or trial.needs.messages is None:
            continue
        links = with_messages(findings.known, row.cluster, trial.needs.messages)
        gain = Case(row, findings.profiles[row.name]).gain(links)
        within = within or _within(gain, row)
        found.append(f"With the rate that {other.model} on {other.shape} needs, {gain:.2f}×.")
    return found, within


def _other_model(row: Row, findings: Findings) -> Reason:
    """AWD-LM and S2VT: no profile was published, nor the model's shape."""
    published, profile = row.published, findings.profiles[row.published.name]
    work = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    speed = row.outcome.problem.cluster.device.speed
    exchange = _exchange(row, findings.known)
    most = longest_work(published.speedup, published.workers, exchange) * speed
    peak = devices.load("v100").peaks["float32"]
    floor = most * peak
    text = (
        f"Not explained. The bundled model computes {work * 1e3:.0f} ms a minibatch, and by these shares its gradients"
        f" take {exchange * 1e3:.0f} ms, so that data parallelism hides them, and no pipeline can be faster. For"
        f" {published.speedup:g}×, even perfectly balanced and with nothing hidden, the model must compute for at most"
        f" {most * 1e3:.0f} ms a V100, which at its peak are {floor / 1e12:.2f} TFLOP: the model that was run did much"
        " less with as many weights. Its shape was not published."
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
