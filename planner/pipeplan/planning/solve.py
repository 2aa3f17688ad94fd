"""Solves a problem: runs the solvers, improves their plans by simulation, and states what is proven, phase by phase."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.formulas import ROUNDING
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.errors import InfeasibleError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import VIRTUAL
from pipeplan.planning import baselines
from pipeplan.planning.baselines import UNIFORM_GRID, Baseline, listed_plan, satisfies_options, why_not_listed
from pipeplan.planning.candidate_search import UNIFORM
from pipeplan.planning.candidates import Candidate, simplest_of
from pipeplan.planning.choose import Choice
from pipeplan.planning.figure import Figure, FiguredPlan, figured
from pipeplan.planning.local_search import compact, improve, with_depths
from pipeplan.planning.outcome import NO_CERTIFICATE, Outcome, state_verdict
from pipeplan.planning.run_solvers import Means, best_plan, certificate_of, refuse_contradiction, run_solvers
from pipeplan.planning.settings import ProgressTracker, Report, Settings
from pipeplan.planning.virtual_stages.solve_virtual import solve_with_virtual_stages
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.certificate import Certificate
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline

RELAXATION = "relaxation"
"""Name under which the bound of a choice (`prove.py`) appears among the solvers' results."""
STOPPED_CERTIFICATE = Certificate(None, "Ctrl-C came before a certificate was made")


def solve(
    problem: Problem,
    settings: Settings | None = None,
    *,
    report: Report | None = None,
    deadline: Deadline | None = None,
    known: Sequence[Plan] = (),
    choice: Choice | None = None,
) -> Outcome:
    """Find the best plan for a problem by its figure, cross-check the solvers, and compare the plan with the baselines.

    `known` has plans of the problem, such as the plan of a choice; the answer is at least as fast as these. `choice` is
    the choice that led to the problem, or None. The choice becomes part of the outcome, whose bound then covers every
    plan of the question (`Choice.bound_s`), and not only plans of the problem.

    The time limit, or Ctrl-C at any moment, ends the search with the best plan so far. Remarks in the outcome then name
    the parts that are missing. `report` is called with every change of phase, best plan and bound. A `deadline` that
    began earlier replaces the time limit. Raises `InfeasibleError` if no plan satisfies the constraints, `Disagreement`
    if the solvers contradict each other, `InputError` for settings that do not fit the problem, and `KeyboardInterrupt`
    if Ctrl-C came before there was a plan.
    """
    settings = settings or Settings()
    tracker = ProgressTracker(report)
    deadline = deadline or Deadline.after(settings.time_limit_s)
    if problem.options.flushes and problem.options.schedule in VIRTUAL:
        return replace(solve_with_virtual_stages(problem, settings, deadline), choice=choice)
    if problem.options.is_listed:
        return _listed_outcome(problem, settings, deadline, choice)
    search = _Search(problem, Means(settings, deadline, tracker), known, choice)
    try:
        search.run()
    except KeyboardInterrupt:
        search.interrupted = True
    return search.outcome()


def _listed_outcome(problem: Problem, settings: Settings, deadline: Deadline, choice: Choice | None) -> Outcome:
    """The best plan of a problem whose plans are listed, with the bound that the choice has found.

    Raises `InfeasibleError` if no plan fits, or if workers cannot share the microbatches.
    """
    found = listed_plan(problem)
    if found is None:
        raise InfeasibleError(why_not_listed(problem))
    one = figured(*found, problem, deadline, simulates=settings.simulate)
    bound_s = 0.0 if choice is None else min(choice.proven.sample_s * problem.profile.minibatch, one.step_s)
    # For unequal shares, the bound comes from the relaxation and holds for simulated times.
    solver = RELAXATION if problem.options.unequal_shares else "DP"
    results = (Result(solver, Status.TIME_LIMIT, None, math.inf, bound_s, 0.0),)
    certificate = Certificate(None, "no certificate covers plans that divide the weights or take unequal shares")
    return Outcome(
        problem,
        one.plan,
        one.score,
        results,
        state_verdict(problem, one.step_s, bound_s, results),
        (),
        {},
        bound_s,
        certificate if settings.certify else NO_CERTIFICATE,
        one.figure,
        choice,
    )


class _Search:
    """One solve: the findings of each phase so far, so that the solve can end after any phase."""

    def __init__(self, problem: Problem, means: Means, known: Sequence[Plan], choice: Choice | None) -> None:
        self._problem, self._means, self._choice = problem, means, choice
        self._known = tuple(plan for plan in known if satisfies_options(plan, problem))
        self._phases: dict[str, float] = {}
        self._cuts: Cuts | None = None
        self._results: tuple[Result, ...] = ()
        self._best: tuple[Plan, Evaluation] | None = None
        self._certificate = STOPPED_CERTIFICATE
        self._compared: tuple[Baseline, ...] | None = None
        self._figured: FiguredPlan | None = None
        self.interrupted = False
        """Whether the user pressed Ctrl-C."""

    def run(self) -> None:
        """Run all phases. On Ctrl-C, keep the findings so far and raise `KeyboardInterrupt`."""
        problem, means = self._problem, self._means
        with self._phase("cuts"):
            self._cuts = cuts = enumerate_cuts(problem, means.settings.maximum_cuts, means.share("cuts"))
        self._results = results = run_solvers(problem, cuts, means, self._known)
        self._phases.update({result.solver: result.seconds for result in results})
        refuse_contradiction(problem, results)
        self._best = best_plan(problem, cuts, means, results, self._known)
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt
        with self._phase("certificate"):
            if means.settings.certify:
                ends = means.share("certificate")
                self._certificate = certificate_of(problem, cuts, results, self._best[1], ends)
        with self._phase("baselines"):
            self._compared = tuple(self._find_baselines(cuts))
        with self._phase("simulation"):
            self._choose()

    def _find_baselines(self, cuts: Cuts) -> Iterator[Baseline]:
        """The baselines that are shown, and that may replace the plan."""
        problem = self._problem
        yield baselines.data_parallelism(problem)
        if self._means.settings.compare and not problem.options.grid and problem.options.stages != 1:
            grid = self._chosen_grid() or baselines.uniform_grid(problem, cuts, self._means.share("baselines"))
            yield grid

    def _chosen_grid(self) -> Baseline | None:
        """The uniform pipeline that the choice has found, as a baseline; None if a search must find one.

        The pipeline must be a plan of this problem with a flush. If the choice took a uniform pipeline, a search may
        find better cuts under the schedule of this problem.
        """
        choice, problem = self._choice, self._problem
        rival = None if choice is None or not problem.options.flushes else choice.rival(UNIFORM)
        if rival is None or (rival.cluster, rival.problem.profile) != (problem.cluster, problem.profile):
            return None
        shape, fitted = grid_shape_of(rival.plan, problem.cluster), with_depths(rival.plan, problem)
        taken = choice is not None and grid_shape_of(choice.taken.plan, problem.cluster) is not None
        if taken or fitted is None or shape is None:
            return None
        return Baseline(UNIFORM_GRID, fitted[1].step_time_s, shape.text, "", fitted[0])

    def _choose(self) -> None:
        """Take the best plan by the figure, or the simplest plan near it, and add the figures of the baselines."""
        problem, settings, ends = self._problem, self._means.settings, self._means.share("simulation")
        plans = [
            self._finished()[0],
            *self._known,
            *(result.plan for result in self._results if result.plan is not None),
        ]
        plans += [one.plan for one in self._baselines() if one.plan is not None and one.fits]
        found = [one for plan in dict.fromkeys(plans) if (one := self._figured_plan(plan, ends)) is not None]
        # Set the plan before it is improved, so that Ctrl-C from here on leaves a plan with a figure.
        self._figured = min(found, key=lambda one: one.step_s)
        if settings.simulate:
            best = improve(self._figured, problem, ends)
            moved = self._figured_plan(compact(best.plan, problem), ends)
            found += [best] if moved is None else [best, moved]
        if settings.simplify:
            # A known plan may already use up the tolerance, relative to the fastest plan of a wider search.
            known_s = min((one.step_s for one in found if one.plan in self._known), default=math.inf)
            rivals = [Candidate("", problem, one.plan, one.figure) for one in found if one.step_s <= known_s]
            simplest = simplest_of(rivals).plan
            found = [one for one in found if one.plan == simplest]
        self._figured = min(found, key=lambda one: one.step_s)
        self._compared = tuple(self._with_figure(one, ends) for one in self._baselines())

    def _figured_plan(self, plan: Plan, deadline: Deadline) -> FiguredPlan | None:
        """The plan with its figure; None if it breaks a constraint or does not fit in memory."""
        problem = self._problem
        if not satisfies_options(plan, problem):
            return None
        score = evaluate(plan, problem)
        if problem.options.memory and not score.fits:
            return None
        return figured(plan, score, problem, deadline, simulates=self._means.settings.simulate)

    def _with_figure(self, one: Baseline, deadline: Deadline) -> Baseline:
        """The baseline with its figure, for the comparison."""
        if one.plan is None or one.step_time_s is None or not one.fits:
            return one
        score = evaluate(one.plan, self._problem)
        found = figured(one.plan, score, self._problem, deadline, simulates=self._means.settings.simulate)
        return replace(one, figure=found.figure)

    def _finished(self) -> tuple[Plan, Evaluation]:
        """The best plan by the formulas. Raises `KeyboardInterrupt` if there is no plan."""
        return self._best or self._unfinished()

    def _baselines(self) -> tuple[Baseline, ...]:
        if self._compared is not None:
            return self._compared
        return tuple(baselines.unsearched_baselines(self._problem, baselines.STOPPED))

    def outcome(self) -> Outcome:
        """The outcome from the phases that completed. Raises `KeyboardInterrupt` if there is no plan."""
        problem = self._problem
        if self._figured is None:
            plan, score = self._finished()
            self._figured = FiguredPlan(plan, score, Figure(score.step_time_s, note="Ctrl-C came before"))
        found = self._figured
        certificate = self._certificate if self._means.settings.certify else NO_CERTIFICATE
        bound = max(result.bound_s for result in self._results)
        bound = min(bound if self._choice is None else self._choice.bound_s(bound), found.step_s)
        results = self._results
        if bound > max(result.bound_s for result in results) * (1 + ROUNDING):
            results = (*results, Result(RELAXATION, Status.TIME_LIMIT, None, math.inf, bound, 0.0))
        bound = max(bound, contention.least_step_time_of_shared_cores_s(problem))
        return Outcome(
            problem,
            found.plan,
            found.score,
            results,
            state_verdict(problem, found.step_s, bound, results),
            self._baselines(),
            self._phases,
            bound,
            certificate,
            found.figure,
            self._choice,
        )

    def _unfinished(self) -> tuple[Plan, Evaluation]:
        """The best plan that the solvers found, for a search that Ctrl-C ended before it chose a plan."""
        if self._cuts is None:
            raise KeyboardInterrupt("the model's cuts were still being listed, so there is no plan yet")
        if all(result.plan is None for result in self._results):
            raise KeyboardInterrupt("no plan was found until then")
        refuse_contradiction(self._problem, self._results)
        return best_plan(self._problem, self._cuts, self._means, self._results, self._known, deepen=False)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Report the block as a phase, and record its wall-clock seconds."""
        self._means.tracker.phase(name)
        began = time.perf_counter()
        yield
        self._phases[name] = time.perf_counter() - began
