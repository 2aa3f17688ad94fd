"""Finds out why no plan satisfies the constraints, by searching for changes that would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from pipeplan.cluster_data import variants
from pipeplan.cluster_data.local import LOCAL
from pipeplan.cost import formulas
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_table import LayersAlone, unit_figures
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.diagnosis import ClusterGrowth, Diagnosis, OversizedLayers, SufficientMemory
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem, contradicting_pins
from pipeplan.problem.units import Unit
from pipeplan.solvers.dp import dynamic_program
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime

Found = TypeVar("Found")

_PRECISION = 1.001
"""Relative precision of the memory search. The result is then reduced to the memory that the found plan needs."""
_MOST_MEMORY = 2.0**60
"""Memory of one device, in bytes, beyond which memory is not the reason that the problem is infeasible."""
_MOST_GROWTH = 64
"""Largest factor by which the cluster is enlarged."""
_MOST_WORKERS = 4096
"""Largest number of workers of an enlarged cluster."""
_MOST_CUTS = 2000
"""Largest number of cuts to enumerate after a constraint was relaxed. If a graph has more cuts, only a selection of
them is searched."""

# The constraints that a user may set: option, field of `Options`, and the value that stands for no constraint.
_CONSTRAINTS = (
    ("--stages", "stages", None),
    ("--max-replicas", "max_replicas", None),
    ("--stages", "max_stages", None),
    ("--max-workers", "max_workers", None),
    ("--pin", "pins", ()),
    ("--together", "together", ()),
    ("no_cut_after", "no_cut_after", ()),
    ("--grid", "grid", False),
)


def why_infeasible(problem: Problem, cuts: Cuts, deadline: Deadline = NO_DEADLINE) -> str:
    """The diagnosis in one line: a layer too large for any device, the memory that would suffice, or an option."""
    return _diagnose(problem, cuts, deadline).text


def diagnose(problem: Problem, maximum_cuts: int, deadline: Deadline = NO_DEADLINE) -> Diagnosis:
    """Explain why a problem has no plan, by searches of at most `maximum_cuts` cuts of its graph until the deadline."""
    return _diagnose(problem, enumerate_cuts(problem, maximum_cuts, deadline.share(0.5)), deadline)


class _Attempts:
    """Runs the searches of a diagnosis, each for a share of the time that is left.

    Ctrl-C ends all remaining searches.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline, self.unfinished = deadline, False

    def attempt(self, search: Callable[[Deadline], Found], part: float) -> Found | None:
        """The finding of a search; None if it finds nothing or runs out of time."""
        deadline = self._deadline.share(part)
        try:
            deadline.check()
            return search(deadline)
        except OutOfTime:
            self.unfinished = True
        except KeyboardInterrupt:
            self.unfinished, self._deadline = True, Deadline.after(0.0)
        return None


def _diagnose(problem: Problem, cuts: Cuts, deadline: Deadline) -> Diagnosis:
    """The diagnosis of a problem, by searches on the given cuts."""
    attempts = _Attempts(deadline)
    devices = problem.cluster.devices
    largest = max(devices, key=lambda device: device.memory_bytes)
    smallest = min(devices, key=lambda device: device.memory_bytes)
    oversized = _oversized(problem, float(largest.usable_bytes)) if problem.options.memory else ()
    sharding = attempts.attempt(lambda ends: _fits_with_sharding(problem, cuts, ends), 0.25)
    # More memory gets half of the time, and more servers half of the rest.
    enough = attempts.attempt(lambda ends: _enough_memory(problem, cuts, smallest.memory_bytes, ends), 0.5)
    growth, relaxed, too_few = None, list[str](), None
    if not oversized:
        too_few = attempts.attempt(lambda ends: _too_few_minibatches(problem, cuts, ends), 0.5)
        growth = attempts.attempt(lambda ends: _enough_servers(problem, cuts, ends), 0.5)
        attempts.attempt(lambda ends: relaxed.extend(_options_to_relax(problem, ends)), 1.0)
    return Diagnosis(
        device=largest.name if oversized else smallest.name,
        capacity_bytes=float(largest.usable_bytes if oversized else smallest.memory_bytes),
        uniform=largest.memory_bytes == smallest.memory_bytes,
        workers=problem.cluster.workers,
        oversized=oversized,
        enough=enough,
        growth=growth,
        relaxed=tuple(relaxed),
        unfinished=attempts.unfinished,
        shared=problem.cluster.name == LOCAL and problem.cluster.workers > 1 and smallest.kind == "cpu",
        pinned=_impossible_pins(problem),
        sharding=bool(sharding),
        too_few=too_few,
        minibatch=problem.profile.minibatch,
    )


def _fits_with_sharding(problem: Problem, cuts: Cuts, deadline: Deadline) -> bool:
    """Whether a plan fits if replicas divide the optimiser's state; False if they already do."""
    options = problem.options
    profile = problem.profile
    divided = profile.optimizer_state_ratio if profile.optimizer_elementwise else 0.0
    divisible = options.sharding == Sharding.NONE and problem.training and divided
    if not (options.memory and divisible):
        return False
    sharded = replace(problem, options=replace(options, sharding=Sharding.OPTIMIZER))
    return dynamic_program.is_feasible(sharded, cuts, deadline.at)


def _oversized(problem: Problem, capacity: float) -> tuple[OversizedLayers, ...]:
    everyone, ratio = problem.cluster.workers, problem.divided_ratio
    needed = [
        (alone_bytes(problem, unit) - formulas.divided_state(unit.parameter_bytes, everyone, ratio), unit.layers)
        for unit in problem.units
    ]
    oversized = [OversizedLayers(layers, size, capacity) for size, layers in needed if size > capacity]
    return tuple(sorted(oversized, key=lambda group: -group.needs_bytes))


def alone_bytes(problem: Problem, unit: Unit) -> float:
    """Bytes that a worker needs for this unit alone, with one minibatch in flight and no communication buffers."""
    layers = LayersAlone(problem, unit_figures([unit]), problem.state_ratio)
    needed = layers.kept_bytes + problem.training * (layers.version_bytes + layers.each_bytes) + unit.workspace_bytes
    return float(problem.cluster.executor.memory_with(float(needed[0])))


def _enough_memory(problem: Problem, cuts: Cuts, capacity: int, deadline: Deadline) -> SufficientMemory | None:
    """The smallest memory with which a plan exists, to a thousandth; None if more memory does not help.

    If time runs out before the smallest memory is known, the result is some memory that suffices. Raises `OutOfTime` if
    none is known.
    """
    if not problem.options.memory:
        return None

    def with_more_memory(factor: float) -> Problem:
        return problem.within(variants.with_more_memory(problem.cluster, factor))

    def feasible(factor: float, ends: Deadline) -> bool:
        return dynamic_program.is_feasible(with_more_memory(factor), cuts, ends.at)

    low, high = 1.0, 1.0
    most = _MOST_MEMORY / max(device.memory_bytes for device in problem.cluster.devices)
    while high < most:
        high = min(2 * high, most)
        if feasible(high, deadline):
            break
        low = high
    else:
        return None
    # Part of the time that is left is for finding the plan with this memory.
    narrowing = deadline.share(0.5)
    try:
        while high / low > _PRECISION:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if feasible(middle, narrowing) else (middle, high)
    except OutOfTime:
        pass
    plan = dynamic_program.solve(with_more_memory(high), cuts, deadline.left_s).plan
    if plan is None:
        deadline.check()
        return None
    shares = _shares_of_memory(plan, with_more_memory(high))
    # The plan may need less memory than the search granted.
    needed = math.ceil(capacity * high * min(1.0, max(shares)))
    return SufficientMemory(needed, capacity, plan, shares.index(max(shares)) + 1)


def _shares_of_memory(plan: Plan, problem: Problem) -> list[float]:
    """For every stage, the memory that it needs, as a fraction of its smallest device's memory."""
    sizes = [stage.memory_bytes for stage in evaluate(plan, problem).stages]
    return [size / problem.cluster.memory_of(stage.workers) for size, stage in zip(sizes, plan.stages, strict=True)]


def _enough_servers(problem: Problem, cuts: Cuts, deadline: Deadline) -> ClusterGrowth | None:
    """The fewest components of the outermost level for which a plan exists, found by bisection.

    Feasibility is monotonic in the number of components, because a plan may leave workers idle.
    """
    now = problem.cluster.levels[-1].count
    most = min(now * _MOST_GROWTH, max(now, _MOST_WORKERS * now // problem.cluster.workers))

    def feasible(count: int) -> bool:
        grown = problem.within(variants.grown_cluster(problem.cluster, count))
        return dynamic_program.is_feasible(grown, cuts, deadline.at)

    try:
        count = _least_count(now, feasible, most)
    except InputError:
        return None
    return None if count is None else ClusterGrowth(variants.unit_of_growth(problem.cluster), count, now)


def _too_few_minibatches(problem: Problem, cuts: Cuts, deadline: Deadline) -> tuple[int, int] | None:
    """(minibatches per update, fewest for which 2BW has a plan); None if this number is not the reason."""
    now = problem.options.accumulate
    if problem.minibatches_in_flight is None or now is None:
        return None

    def feasible(count: int) -> bool:
        more = replace(problem, options=replace(problem.options, accumulate=count))
        return dynamic_program.is_feasible(more, cuts, deadline.at)

    count = _least_count(now, feasible, _MOST_GROWTH * max(now, problem.cluster.workers))
    return None if count is None else (now, count)


def _least_count(none: int, feasible: Callable[[int], bool], most: int) -> int | None:
    """The smallest feasible count above `none` and up to `most`, by doubling and bisection.

    `none` is known to be too few.
    """
    low, high = none, none
    while high < most:
        high = min(2 * high, most)
        if feasible(high):
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high


def _options_to_relax(problem: Problem, deadline: Deadline) -> Iterator[str]:
    """The user's options that prevent a plan: leaving out any one of them makes a plan possible."""
    for flag, name, unset in _CONSTRAINTS:
        if getattr(problem.options, name) == unset:
            continue
        without: dict[str, Any] = {name: unset}
        relaxed = replace(problem, options=replace(problem.options, **without))
        # Without `together` or `no_cut_after` the graph has more cuts.
        if dynamic_program.is_feasible(relaxed, enumerate_cuts(relaxed, _MOST_CUTS, deadline), deadline.at):
            yield flag


def _impossible_pins(problem: Problem) -> str:
    """A clause that names a layer pinned to an impossible stage, or two contradicting pins; empty if there are none."""
    most = min(problem.cluster.workers, len(problem.units))
    pinned = next((f"{name!r} is pinned to stage {stage}" for name, stage in problem.options.pins if stage > most), "")
    if pinned:
        return f"{pinned}, and there can be {most} at most; "
    return contradicting_pins(problem)
