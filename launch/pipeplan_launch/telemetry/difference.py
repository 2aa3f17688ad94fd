"""The difference between a run's predicted and measured step time, divided among its sources: at most five lines.

The sources are the layers on this machine, the executor's own work, other programs, and the network. Each gets the
mean, over all orders of the sources, of what exchanging its predicted times for the measured ones changes (the Shapley
value), so the parts add up. What remains is time in which no worker was busy.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeplan_launch.telemetry.step_time_model import AS_PREDICTED, CORE, OWN_WORK, StepTimeModel, step_time_model_of

WORTH_A_LINE = 0.05
"""Share of the difference below which a part has no line of its own."""
MACHINE, EXECUTOR, PROGRAMS, NETWORK, WAITING = "machine", "executor", "programs", "network", "waiting"
_WORDS = {
    MACHINE: "this machine: passes and updates, beside those of the profile",
    EXECUTOR: "the executor: reading samples, sending, and all else that it does",
    PROGRAMS: "other programs: workers waited for a core that these used",
    NETWORK: "the network: all-reduces, and messages that were waited for",
    WAITING: "waiting: no worker was busy, as times vary and minibatches are handed on late",
}


def difference(summary: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per minibatch of the difference, measured less predicted, by source; empty where nothing is to say."""
    predicted, measured = summary["minibatch_s"]["predicted"], summary["minibatch_s"]["measured"]
    if not predicted or not measured or abs(measured / predicted - 1) <= AS_PREDICTED:
        return {}
    model = step_time_model_of(summary)
    if model is None:
        return {}
    parts = _parts(model, *sorted((predicted, measured)))
    rest = NETWORK if _link_bound(model, predicted) else WAITING
    parts[rest] = parts.get(rest, 0.0) + measured - predicted - sum(parts.values())
    return parts


def difference_lines(summary: Mapping[str, Any]) -> list[str]:
    """The lines for the table at the end of a run: a first one with the difference, then its largest parts."""
    parts = difference(summary)
    if not parts:
        return []
    total = sum(parts.values())
    chosen = sorted(parts.items(), key=lambda part: -abs(part[1]))
    chosen = [(name, value) for name, value in chosen if abs(value) >= WORTH_A_LINE * abs(total)][:4]
    more = "more" if total > 0 else "less"
    lines = [f"{abs(total) * 1e3:.3g} ms {more} than predicted for each minibatch, of which"]
    return lines + [f"  {value * 1e3:+.3g} ms  {_WORDS[name]}" for name, value in chosen]


def _parts(model: StepTimeModel, low_s: float, high_s: float) -> dict[str, float]:
    """The mean change of the step time by exchanging the times of each source, over all orders of the sources.

    Step times beyond the two that are compared count as the nearer one: what binds there is not in the times.
    """
    before, after = [one.predicted for one in model.stages], [one.measured for one in model.stages]
    sources = sorted({_source(name) for one in before for name in one})
    known = {chosen: min(high_s, max(low_s, _step_time(model, before, after, chosen))) for chosen in _subsets(sources)}
    changes: dict[str, list[float]] = {source: [] for source in sources}
    for order in itertools.permutations(sources):
        exchanged: frozenset[str] = frozenset()
        for source in order:
            changes[source].append(known[exchanged | {source}] - known[exchanged])
            exchanged |= {source}
    return {source: statistics.fmean(values) for source, values in changes.items()}


def _step_time(
    model: StepTimeModel,
    before: Sequence[Mapping[str, float]],
    after: Sequence[Mapping[str, float]],
    chosen: frozenset[str],
) -> float:
    """The step time with the measured times of some sources, and the predicted ones of the others."""
    return model.step_time(
        [
            {name: (new if _source(name) in chosen else old)[name] for name in old}
            for old, new in zip(before, after, strict=True)
        ]
    )


def _subsets(sources: Sequence[str]) -> Iterable[frozenset[str]]:
    counts = range(len(sources) + 1)
    return (frozenset(one) for count in counts for one in itertools.combinations(sources, count))


def _source(term: str) -> str:
    if term == CORE:
        return PROGRAMS
    if term == "sync_s":
        return NETWORK
    return EXECUTOR if term in OWN_WORK else MACHINE


def _link_bound(model: StepTimeModel, predicted_s: float) -> bool:
    """Whether the plan expects a link to be busy all the time."""
    return any(one.boundary_s >= (1 - AS_PREDICTED) * predicted_s for one in model.stages)
