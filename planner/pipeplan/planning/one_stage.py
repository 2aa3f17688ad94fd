"""A lower bound on the figures of all plans of one stage.

There are few such plans. So each of them that is fast enough by the formulas is simulated, and the bound is the fastest
figure. On a cluster of equal servers, only plans on the first workers are tried, because plans of as many other workers
are no faster.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.cost import formulas
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.figure import figured
from pipeplan.planning.local_search import with_depths
from pipeplan.problem.problem import Problem
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.util.deadline import Deadline

MOST_SIMULATED = 24
"""Largest number of plans of a problem that are simulated. The formulas bound the others."""


def one_stage_bound_s(problem: Problem, limit_s: float, deadline: Deadline) -> float:
    """Lower bound on the figure of every plan of one stage with whole weights, in seconds per microbatch.

    The bound is at most `limit_s`.
    """
    fitting = (one for plan in _plans(problem, limit_s) if (one := with_depths(plan, problem)) is not None)
    found = sorted(fitting, key=lambda one: one[1].step_time_s)
    for number, (plan, score) in enumerate(found):
        if score.step_time_s >= limit_s:
            break
        if number == MOST_SIMULATED or deadline.passed:
            return score.step_time_s
        limit_s = min(limit_s, figured(plan, score, problem, deadline).step_s)
    return limit_s


def _plans(problem: Problem, limit_s: float) -> Iterator[Plan]:
    """The plans of one stage that may take less than `limit_s` seconds per microbatch. They have no depths yet."""
    count = problem.options.accumulate or 1
    work_s = sum(unit.forward_s + unit.backward_s - unit.update_s for unit in problem.units)
    for space in plan_spaces(problem):
        inner = space.inner(problem)
        workers, devices = inner.cluster.workers, inner.cluster.devices
        for first in (0,) if inner.cluster.uniform else range(workers):
            for end in range(first + 1, workers + 1):
                slowest = min(device.speed for device in devices[first:end])
                rounds = float(formulas.rounds(formulas.rounds(count, space.copies), end - first))
                if rounds * work_s / slowest < limit_s * count and not space.unused & set(range(first, end)):
                    yield space.plan(problem, [Stage(problem.layer_names, tuple(range(first, end)), 1, 1)])
