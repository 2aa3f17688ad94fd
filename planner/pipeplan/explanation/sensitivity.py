"""How a plan and its step time depend on the measured times and on the cluster.

Robustness: the times are drawn again from their measured distributions, and the plan is compared with the best plan for
each drawing. Gains of other machines: the problem is solved again with one property of the cluster changed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from pipeplan.cluster_data import variants
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.planning.fast import ScoredPlan, best_plan
from pipeplan.planning.outcome import TOLERANCE
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile

NORMAL_QUARTILES = 1.3489795
"""Interquartile range of a normal distribution of standard deviation 1."""
SLOWEST, FASTEST = 10.0, 0.1
"""Bounds of a drawn time, as multiples of the measured time. A normal distribution has no bounds."""


@dataclass(frozen=True)
class RobustnessSample:
    """The result of one drawing of all times."""

    step_time_s: float
    """Seconds per minibatch of the plan with these times."""
    best_s: float
    """Seconds per minibatch of the best plan for these times."""
    config: str
    """Configuration of the best plan for these times."""

    @property
    def behind(self) -> float:
        """Relative slowdown of the plan against the best plan for these times."""
        return max(0.0, self.step_time_s / self.best_s - 1)


@dataclass(frozen=True)
class Robustness:
    """All samples of one plan."""

    samples: tuple[RobustnessSample, ...]
    config: str
    """Configuration of the plan."""
    seed: int
    assumed: float | None
    """The relative spread that was assumed; None if it was measured."""

    @property
    def stays_best(self) -> int:
        """Number of samples in which no plan is better."""
        return sum(sample.behind <= TOLERANCE for sample in self.samples)

    @property
    def same_config(self) -> int:
        """Number of samples whose best plan has the same configuration, possibly with other cuts."""
        return sum(sample.config == self.config for sample in self.samples)

    @property
    def worst(self) -> float:
        """Relative slowdown of the plan against the best in its worst sample."""
        return max((sample.behind for sample in self.samples), default=0.0)

    @property
    def median(self) -> float:
        """Relative slowdown of the plan against the best in the median sample."""
        return median(sample.behind for sample in self.samples) if self.samples else 0.0

    @property
    def rivals(self) -> list[tuple[str, int]]:
        """The other configurations that were best, each with its number of samples, most frequent first."""
        counts = Counter(sample.config for sample in self.samples if sample.config != self.config)
        return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def has_spread(profile: Profile) -> bool:
    """Whether any layer's time was measured with a spread."""
    return any(layer.forward_spread_s > 0 or layer.backward_spread_s > 0 for layer in profile.layers)


def check_spread(relative: float) -> None:
    """Raise an `InputError` unless a spread lies between 0 and 1."""
    if not 0 <= relative <= 1:
        raise InputError(f"the spread must lie between 0 and 1 (100%), not {relative:g}")


def with_spread(profile: Profile, relative: float) -> Profile:
    """The profile with every interquartile range set to `relative` · the layer's time."""
    check_spread(relative)
    layers = tuple(
        replace(layer, forward_spread_s=layer.forward_s * relative, backward_spread_s=layer.backward_s * relative)
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def resample_times(profile: Profile, rng: random.Random) -> Profile:
    """The profile with every time drawn from a normal distribution with its mean and interquartile range."""

    def draw(time_s: float, spread_s: float) -> float:
        drawn = rng.gauss(time_s, spread_s / NORMAL_QUARTILES)
        return min(max(drawn, FASTEST * time_s), SLOWEST * time_s)

    def redrawn(layer: Layer) -> Layer:
        forward = draw(layer.forward_s, layer.forward_spread_s)
        return replace(layer, forward_s=forward, backward_s=draw(layer.backward_s, layer.backward_spread_s))

    return replace(profile, layers=tuple(redrawn(layer) for layer in profile.layers))


def draw_samples(problem: Problem, cuts: Cuts, plan: Plan, count: int, seed: int) -> Iterator[RobustnessSample]:
    """Draw the times `count` times. For each drawing, evaluate the plan with its depths unchanged, and solve again.

    Drawings for which no plan fits in memory are left out, because other times may need deeper pipelines.
    """
    rng = random.Random(seed)
    for _ in range(count):
        drawn = replace(problem, profile=resample_times(problem.profile, rng))
        best = best_plan(drawn, cuts.retimed(drawn))
        if best is not None:
            score = evaluate(plan, drawn)
            if score.fits and score.step_time_s <= best.step_time_s:
                best = ScoredPlan(plan, score.step_time_s)
            yield RobustnessSample(score.step_time_s, best.step_time_s, best.plan.config)


@dataclass(frozen=True)
class ChangeEffect:
    """The best plan after a change of the cluster."""

    name: str
    step_time_s: float | None
    """Seconds per minibatch of the best plan after the change; None if there is no plan, or no such cluster."""
    gain: float | None
    """Speedup over the present best plan."""
    config: str = ""
    remark: str = ""


def cluster_changes(cluster: Cluster) -> Iterator[tuple[str, Callable[[], Cluster]]]:
    """(name, function that makes the changed cluster): a property is doubled, or a server or worker is added."""
    for index in reversed(variants.joining_levels(cluster)):
        name = f"links of level {cluster.levels[index].name} twice as fast"
        yield name, partial(variants.with_faster_links, cluster, index, 2.0)
        for operation in variants.OPERATIONS:
            yield f"  for {operation} alone", partial(variants.with_faster_links, cluster, index, 2.0, operation)
    more = cluster.levels[-1].count + 1
    yield f"one more {variants.unit_of_growth(cluster)}", partial(variants.grown_cluster, cluster, more)
    yield "devices with twice the memory", partial(variants.with_more_memory, cluster, 2.0)
    yield "devices twice as fast", partial(variants.with_faster_devices, cluster, 2.0)


def change_effects(problem: Problem, cuts: Cuts, step_time_s: float) -> Iterator[ChangeEffect]:
    """For each change of the cluster, the best plan by the formulas, compared with `step_time_s`.

    All changes use the same cuts, because cuts do not depend on the cluster.
    """
    for name, make in cluster_changes(problem.cluster):
        try:
            best = best_plan(problem.within(make()), cuts)
        except InputError as error:
            yield ChangeEffect(name, None, None, remark=str(error))
            continue
        if best is None:
            yield ChangeEffect(name, None, None, remark="no plan")
            continue
        yield ChangeEffect(name, best.step_time_s, step_time_s / best.step_time_s, best.plan.config)
