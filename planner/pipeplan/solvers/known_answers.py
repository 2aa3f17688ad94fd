"""Results of searches that later searches of similar problems reuse: plans, bounds, and answers to the same question.

If `planning.fast` asks for it, `dynamic_program.solve` keeps its results, and starts from earlier ones. Problems are
similar if they differ only in the cluster. Then

  a plan    of one problem is a plan of the other if both clusters have the same components. Its step time there is an
            upper bound, and one search right below this bound is often enough;
  a bound   of one problem holds for the other on every cluster that is no better: with links that are no faster and no
            more memory (docs/cost-model.md, "More is never worse");
  an answer that is proven holds for the same question, also if plans must be faster.

Known answers only make a search faster. The search finds the best plan in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import starmap

from pipeplan.cluster_data.cluster import Cluster, Level
from pipeplan.cost import depths
from pipeplan.plan.plan import Plan
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp.threshold import PRECISION
from pipeplan.solvers.result import Result, Status

_MOST_PLANS = 3
"""Number of the latest plans of a kind that are tried."""
_SAME = 1 + 1e-6
"""Factor on the step time of a known plan, so that the limit includes the plan itself in spite of rounding."""
_ROUNDING = 1e-12
"""Relative margin on the step time that determines depths, so that rounding does not add a minibatch."""
_MARGIN = 1.04
"""Factor on the limit of a search, so that its bound may serve later searches."""

Kind = tuple[Profile, Options, int, bool]
"""The kind of similar problems: profile, options, number of cuts, and whether these are all cuts."""
Question = tuple[Kind, Cluster, float, float]
"""The question of a search: kind, cluster, relative gap that is enough, and largest effort."""


@dataclass
class KnownAnswers:
    """Results of the searches so far, by the kind of the problem."""

    step_time_of: Callable[[Plan, Problem], float]
    """The step time of a plan under a problem, in seconds per minibatch; infinite if it does not fit in memory."""
    plans: dict[Kind, list[tuple[Cluster, Plan]]] = field(default_factory=dict)
    """The latest plans, with the clusters that they were found on."""
    best: dict[Kind, list[tuple[Cluster, Result]]] = field(default_factory=dict)
    """The latest proven answers, with their clusters."""
    bounds: dict[Kind, list[tuple[Cluster, float]]] = field(default_factory=dict)
    """Clusters, each with a lower bound on the step time of every plan on it, in seconds per minibatch."""
    answers: dict[Question, tuple[float, Result]] = field(default_factory=dict)
    """Proven results, each with the step time that limited the search, in seconds per minibatch."""

    def use(
        self,
        question: Question,
        problem: Problem,
        search: Callable[[float, bool, float], Result],
        useful_s: float,
        *,
        near: bool,
    ) -> Result:
        """The best plan with a step time below `useful_s`, from known answers or from a search, whose result is kept.

        The arguments of `search` are the step time below which to search, whether the best plan is probably near it,
        and a lower bound on the step time of every plan.
        """
        kind, cluster = question[:2]
        if (answer := self.answer(question, useful_s)) is not None:
            return answer
        if (bound_s := self.bound_s(kind, cluster)) >= useful_s:
            return Result("DP", Status.INFEASIBLE, None, float("inf"), bound_s, 0.0)
        limit_s, known_s = useful_s, self.step_time_s(kind, problem)
        if (proven := self.proven(kind, problem, bound_s, useful_s)) is not None:
            self.keep(question, useful_s, proven)
            return proven
        if near:
            # A slightly wider search gives a bound that may also hold for the next problems.
            limit_s = useful_s * _MARGIN
        limit_s = min(limit_s, known_s)
        result = search(limit_s, near or known_s < useful_s, bound_s)
        if result.plan is None and limit_s == known_s:
            limit_s = useful_s
            result = search(useful_s, near, bound_s)
        self.keep(question, limit_s, result)
        return result

    def answer(self, question: Question, useful_s: float) -> Result | None:
        """The proven answer to the same question, if it holds for plans with step times below `useful_s`."""
        searched_s, result = self.answers.get(question, (0.0, None))
        if result is None or (result.plan is None and searched_s < useful_s):
            return None
        return result

    def bound_s(self, kind: Kind, cluster: Cluster) -> float:
        """A known lower bound on every plan's step time on a cluster, in seconds per minibatch; 0 if none is known."""
        known = self.bounds.get(kind, [])
        return max((bound for other, bound in known if is_no_better(cluster, other)), default=0.0)

    def step_time_s(self, kind: Kind, problem: Problem) -> float:
        """The smallest step time of a known plan under this problem, with a margin for rounding; infinite if none is
        known."""
        known = self.plans.get(kind, [])
        step_times = (
            self.step_time_of(plan, problem) for cluster, plan in known if _same_shape(cluster, problem.cluster)
        )
        return min(step_times, default=float("inf")) * _SAME

    def proven(self, kind: Kind, problem: Problem, bound_s: float, useful_s: float) -> Result | None:
        """A known answer whose plan reaches the bound under this problem, and takes less than `useful_s`; else None.

        No plan is faster here than on the cluster of that answer. So its plan is the simplest of the fastest plans here
        as well.
        """
        for cluster, known in reversed(self.best.get(kind, [])):
            if not known.charged or known.objective_s < bound_s * (1 - PRECISION):
                continue
            if not is_no_better(problem.cluster, cluster):
                continue
            assert known.plan is not None
            step_time_s = self.step_time_of(known.plan, problem)
            if step_time_s < useful_s and step_time_s <= bound_s * (1 + PRECISION):
                plan = depths.assign_depths(known.plan, problem, step_time_s * (1 + _ROUNDING))
                return replace(known, plan=plan, objective_s=step_time_s, bound_s=step_time_s, seconds=0.0)
        return None

    def keep(self, question: Question, searched_s: float, result: Result) -> None:
        """Keep the result of a search for plans with step times below `searched_s`."""
        kind, cluster = question[:2]
        if result.plan is not None:
            plans = self.plans.setdefault(kind, [])
            others = [known for known in plans if known[1].config != result.plan.config]
            plans[:] = [*others, (cluster, result.plan)][-_MOST_PLANS:]
            if result.status == Status.OPTIMAL:
                best = self.best.setdefault(kind, [])
                best[:] = [*best, (cluster, result)][-_MOST_PLANS:]
        if result.bound_s > 0:
            self.bounds.setdefault(kind, []).append((cluster, result.bound_s))
        if result.status in (Status.OPTIMAL, Status.INFEASIBLE):
            self.answers[question] = searched_s, result


KNOWN: ContextVar[KnownAnswers | None] = ContextVar("known answers", default=None)
"""The known answers in this context; None if searches reuse nothing. `planning.fast` sets it."""


def question_of(problem: Problem, cuts: Cuts, gap: float, most_effort: float) -> Question:
    """The question that a search for the best plan of a problem answers."""
    kind = problem.profile, problem.options, len(cuts.ideals), cuts.complete
    return kind, problem.cluster, gap, most_effort


def is_no_better(cluster: Cluster, other: Cluster) -> bool:
    """Whether every plan on a cluster is also a plan on the other, and no slower there.

    Only uniform clusters are comparable.
    """
    devices = cluster.device, other.device
    return (
        _same_shape(cluster, other)
        and (cluster.executor, cluster.exchange_rings) == (other.executor, other.exchange_rings)
        and devices[0].speed == devices[1].speed
        and devices[0].cores == devices[1].cores
        and devices[0].usable_bytes <= devices[1].usable_bytes
        and all(starmap(_is_no_faster, zip(cluster.levels, other.levels, strict=True)))
    )


def _is_no_faster(level: Level, other: Level) -> bool:
    return (
        level.latency_s >= other.latency_s
        and level.bandwidth * level.allreduce_efficiency <= other.bandwidth * other.allreduce_efficiency
        and level.bandwidth * level.sendrecv_efficiency <= other.bandwidth * other.sendrecv_efficiency
    )


def _same_shape(cluster: Cluster, other: Cluster) -> bool:
    """Whether two uniform clusters have the same components."""
    return cluster.uniform and other.uniform and _counts(cluster) == _counts(other)


def _counts(cluster: Cluster) -> list[int]:
    return [level.count for level in cluster.levels]
