"""How a plan stands up to the spread of the measured times: every layer's time is drawn again within its spread."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from pipeplan.cuts import enumerate_cuts
from pipeplan.errors import InputError
from pipeplan.evaluate import evaluate
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.profile_data import Layer, Profile
from pipeplan.quick import Best, best_plan
from pipeplan.verdict import TOLERANCE

NORMAL_QUARTILES = 1.3489795
"""Interquartile range of a normal distribution of standard deviation 1."""
SLOWEST, FASTEST = 10.0, 0.1
"""A drawn time stays within these multiples of the measured one: times are not negative, and outliers not endless."""


@dataclass(frozen=True)
class Sample:
    """One drawing of all times."""

    pace_s: float
    """Of the plan as it stands."""
    best_s: float
    """Of the best plan for these times."""
    config: str
    """Of that best plan."""

    @property
    def behind(self) -> float:
        """How far the plan is from the best, relative."""
        return max(0.0, self.pace_s / self.best_s - 1)


@dataclass(frozen=True)
class Robustness:
    """All samples of one plan."""

    samples: tuple[Sample, ...]
    config: str
    """Of the plan."""
    seed: int
    assumed: float | None
    """The relative spread that was assumed, where the profile has none; None where it was measured."""

    @property
    def stays_best(self) -> int:
        """In how many samples no plan is better."""
        return sum(sample.behind <= TOLERANCE for sample in self.samples)

    @property
    def same_config(self) -> int:
        """In how many the best plan has the same configuration, if perhaps other layers in its stages."""
        return sum(sample.config == self.config for sample in self.samples)

    @property
    def worst(self) -> float:
        """How far the plan is from the best where it is farthest, relative."""
        return max((sample.behind for sample in self.samples), default=0.0)

    @property
    def median(self) -> float:
        """How far the plan is from the best in the median sample, relative."""
        return median(sample.behind for sample in self.samples) if self.samples else 0.0

    @property
    def rivals(self) -> list[tuple[str, int]]:
        """The other configurations that were best, and how often."""
        counts = Counter(sample.config for sample in self.samples if sample.config != self.config)
        return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def has_spread(profile: Profile) -> bool:
    """Whether any layer's time was measured with a spread."""
    return any(layer.forward_spread_s > 0 or layer.backward_spread_s > 0 for layer in profile.layers)


def with_spread(profile: Profile, relative: float) -> Profile:
    """The profile with an interquartile range of so much of every time."""
    if not 0 <= relative <= 1:
        raise InputError(f"the spread must lie between 0 and 1 (100%), not {relative:g}")
    layers = tuple(
        replace(layer, forward_spread_s=layer.forward_s * relative, backward_spread_s=layer.backward_s * relative)
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def resampled(profile: Profile, rng: random.Random) -> Profile:
    """The profile with every time drawn from a normal distribution around it, of its interquartile range."""

    def draw(time_s: float, spread_s: float) -> float:
        drawn = rng.gauss(time_s, spread_s / NORMAL_QUARTILES)
        return min(max(drawn, FASTEST * time_s), SLOWEST * time_s)

    def again(layer: Layer) -> Layer:
        forward = draw(layer.forward_s, layer.forward_spread_s)
        return replace(layer, forward_s=forward, backward_s=draw(layer.backward_s, layer.backward_spread_s))

    return replace(profile, layers=tuple(again(layer) for layer in profile.layers))


def samples(problem: Problem, plan: Plan, count: int, seed: int, maximum_cuts: int) -> Iterator[Sample]:
    """Draw the times `count` times; each time score the plan as it stands, depths included, and solve anew.

    Drawings for which no plan fits in memory, as deeper pipelines may not, are left out.
    """
    rng = random.Random(seed)
    for _ in range(count):
        drawn = replace(problem, profile=resampled(problem.profile, rng))
        best = best_plan(drawn, enumerate_cuts(drawn, maximum_cuts))
        if best is not None:
            mine = evaluate(plan, drawn)
            if mine.fits and mine.pace_s <= best.pace_s:
                best = Best(plan, mine.pace_s)
            yield Sample(mine.pace_s, best.pace_s, best.plan.config)
