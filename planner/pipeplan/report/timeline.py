"""The pipeline over time, from its fill to the steady state, on as many workers as can be told apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.report.document import KINDS, Timeline, columns
from pipeplan.report.replayed import Simulated
from pipeplan.simulate.report import exit_times, round_length
from pipeplan.simulate.scenario import Scenario

MOST_LANES = 64
MOST_INTERVALS = 12_000
CLOSE = 0.01
"""A round this near to the steady pace is steady."""
SHOWN_ROUNDS = 3
"""Rounds of all replicas, or minibatches where that is more, in the steady part that is shown."""
LEAST_STEADY = 8

Interval = tuple[int, int, int, float, float]
"""Lane, kind, number, start and end."""
_NAMES = ("lane", "kind", "number", "start_s", "end_s")
_KIND = {"F": KINDS.index("forward"), "B": KINDS.index("backward"), "U": KINDS.index("update")}
_REDUCE = KINDS.index("all-reduce")


@dataclass(frozen=True)
class Lanes:
    """The workers that are shown, by stage, then replica."""

    places: tuple[tuple[int, int], ...]
    """Stage and replica of every lane."""
    omitted: str

    @property
    def of(self) -> dict[tuple[int, int], int]:
        """The lane of a stage's replica."""
        return {place: lane for lane, place in enumerate(self.places)}


def lanes(scenario: Scenario, most: int = MOST_LANES) -> Lanes:
    """All workers; where they are too many, the first replicas of every stage, or of stages evenly apart."""
    stages, total = scenario.stages, sum(load.replicas for load in scenario.stages)
    if total <= most:
        return Lanes(tuple((i, r) for i, load in enumerate(stages) for r in range(load.replicas)), "")
    if len(stages) > most:
        chosen = sorted({round(at * (len(stages) - 1) / (most - 1)) for at in range(most)})
        return Lanes(
            tuple((i, 0) for i in chosen), f"Shown are the first workers of {len(chosen)} of {len(stages)} stages."
        )
    shown = [1] * len(stages)
    # One more for each stage in turn, as long as there is room.
    while True:
        more = [i for i, load in enumerate(stages) if shown[i] < load.replicas][: most - sum(shown)]
        if not more:
            break
        for i in more:
            shown[i] += 1
    places = tuple((i, r) for i, count in enumerate(shown) for r in range(count))
    return Lanes(places, f"Shown are {len(places)} of {total} workers: the first replicas of every stage.")


def steady_from(simulated: Simulated) -> float | None:
    """From when on every round of all replicas takes what it takes in the steady state, to a hundredth."""
    steady = simulated.measured.steady
    if steady is None:
        return None
    length = round_length(simulated.scenario)
    times = exit_times(simulated.scenario, simulated.replayed)
    ends = [times[at - 1] for at in range(length, steady.last + 1, length)]
    began = None
    for start, end in reversed(list(itertools.pairwise(ends))):
        if abs((end - start) / length - steady.pace_s) > CLOSE * steady.pace_s:
            break
        began = start
    return began


def timeline(simulated: Simulated) -> Timeline:
    """What is predicted, from the first minibatch on until the steady state has been seen for some rounds."""
    scenario, shown = simulated.scenario, lanes(simulated.scenario)
    began = steady_from(simulated)
    end_s = _until(simulated, began)
    found = _intervals(simulated, shown, end_s)
    if len(found) > MOST_INTERVALS:
        end_s = found[MOST_INTERVALS][3]
        found = [one for one in found[:MOST_INTERVALS] if one[3] < end_s]
    steady = (began, end_s) if began is not None and began < end_s else None
    rows = [
        (scenario.stages[i].workers[r], i, scenario.server_of(scenario.stages[i].workers[r])) for i, r in shown.places
    ]
    return Timeline(
        lanes=columns(("worker", "stage", "server"), rows),
        end_s=end_s,
        steady=steady,
        predicted=columns(_NAMES, found),
        measured=None,
        measured_end_s=None,
        omitted=shown.omitted,
    )


def _until(simulated: Simulated, began: float | None) -> float:
    steady = simulated.measured.steady
    if began is None or steady is None:
        return simulated.replayed.end_s
    rounds = SHOWN_ROUNDS * round_length(simulated.scenario)
    return min(began + max(rounds, LEAST_STEADY) * steady.pace_s, simulated.replayed.end_s)


def _intervals(simulated: Simulated, shown: Lanes, end_s: float) -> list[Interval]:
    """In order of their start; what begins before the end is shown to its own end."""
    of, found = shown.of, []
    for done in simulated.replayed.passes:
        lane, kind = of.get((done.stage, done.replica)), _KIND.get(done.action.kind.value)
        if lane is not None and kind is not None and done.start_s < end_s:
            found.append((lane, kind, done.action.index, done.start_s, done.end_s))
    reduced = {f"all-reduce of stage {stage + 1}": stage for stage, _ in shown.places}
    by_stage = _lanes_by_stage(shown.places)
    for row, number, start_s, until_s in simulated.replayed.transfers:
        if row in reduced and start_s < end_s:
            found += [(lane, _REDUCE, number, start_s, until_s) for lane in by_stage[reduced[row]]]
    return sorted(found, key=lambda one: (one[3], one[0], one[1]))


def _lanes_by_stage(places: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for lane, (stage, _) in enumerate(places):
        found.setdefault(stage, []).append(lane)
    return found
