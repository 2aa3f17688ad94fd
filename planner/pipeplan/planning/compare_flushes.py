"""Compares the synchronous schedules for a problem by simulation: 1f1b-flush, zb-h1, interleaved-1f1b and zb-v.

A plan of 1f1b-flush is given. zb-h1 runs its stages as they are; for the schedules whose workers run several stages
each, other cuts are searched for. The formulas of the schedules bound different things, so the simulation decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSH, INTERLEAVED, VIRTUAL, ZERO_BUBBLE
from pipeplan.planning.virtual_stages.virtual_search import VirtualPlan, search_virtual, with_simulation
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import show_size

WORTHWHILE = 0.03
"""Relative. A schedule is taken in place of 1f1b-flush if its simulation is so much faster."""


@dataclass(frozen=True)
class FlushComparison:
    """A plan of one synchronous schedule, simulated."""

    problem: Problem
    plan: Plan
    pace_s: float
    """Simulated seconds per minibatch."""
    bubble: float
    """Share of the time in which the plan's workers compute nothing."""
    memory_bytes: float
    """Memory of the worker that needs most."""

    def text(self, usual: FlushComparison) -> str:
        """Its cost and its gain beside the usual schedule, in a few words."""
        more = self.memory_bytes - usual.memory_bytes
        change = "as much memory" if abs(more) < 2**20 else f"{show_size(abs(more))} {'more' if more > 0 else 'less'}"
        return f"bubble {self.bubble:.0%} instead of {usual.bubble:.0%}, {change} a worker"


def compare_flushes(problem: Problem, plan: Plan, deadline: Deadline) -> list[FlushComparison]:
    """The plan under 1f1b-flush first, then what the other synchronous schedules reach; [] for plans without a bubble.

    `problem` is that of 1f1b-flush. What is not found or simulated before the deadline is left out.
    """
    if len(plan.stages) == 1 or plan.copies > 1 or problem.options.schedule != FLUSH:
        return []
    usual = _simulated(problem, VirtualPlan(plan, evaluate(plan, problem)), deadline.share(0.2))
    if usual is None:
        return []
    others = [_simulated(*found, deadline.share(0.5)) for found in _others(problem, plan, deadline)]
    return [usual, *sorted((one for one in others if one is not None), key=lambda one: one.pace_s)]


def taken(compared: list[FlushComparison]) -> FlushComparison | None:
    """The schedule that is worth more than 1f1b-flush; None if none is."""
    if len(compared) < 2 or compared[1].pace_s >= compared[0].pace_s * (1 - WORTHWHILE):
        return None
    return compared[1]


def _others(problem: Problem, plan: Plan, deadline: Deadline) -> Iterator[tuple[Problem, VirtualPlan]]:
    """The plans of the other schedules, each with its problem."""
    deferring = replace(problem, options=replace(problem.options, schedule=ZERO_BUBBLE))
    split = depths.assign_depths(plan, deferring, evaluate(plan, problem).pace_s)
    yield deferring, VirtualPlan(split, evaluate(split, deferring))
    for schedule in VIRTUAL:
        options = replace(problem.options, schedule=schedule, stages=None)
        looking = replace(problem, options=options)
        try:
            best = search_virtual(looking, deadline.share(0.4)).plans[0]
        except (InfeasibleError, InputError):
            continue
        if schedule == INTERLEAVED:
            chunks = len(best.plan.stages) // len(best.plan.devices)
            looking = replace(looking, options=replace(options, virtual_stages=chunks))
        yield looking, best


def _simulated(problem: Problem, found: VirtualPlan, deadline: Deadline) -> FlushComparison | None:
    if not found.score.fits and problem.options.memory:
        return None
    known = found if found.simulated_s is not None else with_simulation(found, problem, deadline)
    if known.simulated_s is None:
        return None
    memory = max(cost.memory_bytes for cost in known.score.stages)
    return FlushComparison(
        problem, known.plan, known.simulated_s, _bubble(known.plan, known.score, known.simulated_s), memory
    )


def _bubble(plan: Plan, score: Evaluation, pace_s: float) -> float:
    work = sum(cost.forward_s + cost.backward_s for cost in score.stages)
    return max(0.0, 1 - work / (plan.busy * pace_s))
