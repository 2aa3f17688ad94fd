"""Solves a problem: runs the solvers, cross-checks them, certifies the plan, and compares it with the baselines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.throughput import RunSize, Throughput, throughput_of
from pipeplan.errors import DisagreementError, InfeasibleError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import VIRTUAL
from pipeplan.planning import baselines
from pipeplan.planning.baselines import Baseline, satisfies_options
from pipeplan.planning.beside import SideSearches, side_searches
from pipeplan.planning.certify import certificate_of
from pipeplan.planning.charge_results import charge_result, deepened
from pipeplan.planning.choose_synchrony import SynchronyChoice
from pipeplan.planning.fast import USEFUL, best_of_known
from pipeplan.planning.infeasibility import why_infeasible
from pipeplan.planning.outcome_views import outcome_html, outcome_lines, stage_rows
from pipeplan.planning.progress import ProgressTracker, Report
from pipeplan.planning.simplest import SimplerPlan, Simplification, find_simpler, kind_of
from pipeplan.planning.solve_virtual import NO_PROOF, solve_with_virtual_stages
from pipeplan.planning.stated.choose import Rival, choose_by_simulation
from pipeplan.planning.stated.comparisons import state_baselines
from pipeplan.planning.stated.pace import NOT_SIMULATED, STOPPED, PlanSimulation
from pipeplan.planning.verdict import TOLERANCE, Verdict, contradiction, state_verdict
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.certificate import Certificate
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline

MAXIMUM_CUTS = 50_000
"""For a graph with more cuts the DP searches a selection of them; the ILP still sees the whole graph."""

NO_CERTIFICATE = Certificate(None, "no certificate was requested")
STOPPED_CERTIFICATE = Certificate(None, "Ctrl-C came before a certificate was made")
SHARES = {
    "choice": 0.5,
    "cuts": 0.5,
    "grid": 0.2,
    "first": 0.5,
    "last": 0.8,
    "certificate": 0.5,
    "baselines": 0.8,
    "simplest": 0.5,
    "simulation": 1.0,
    "diagnosis": 1.0,
}
"""The share of the time left that each phase may take: the choice of a schedule, a minibatch size or a number of
workers, the cuts, data parallelism and the best uniform grid, the first of two solvers, the last or only solver, the
certificate, the straight pipeline, the search for a simpler plan, the simulation. Where there is no plan, the diagnosis
takes what the solvers leave. What a phase does not need is left to those after it."""


@dataclass(frozen=True)
class Settings:
    """The solvers to run and their limits."""

    solver: str = "both"
    """`dp`, `ilp` or `both`."""
    backend: str = "highs"
    """The solver of the integer program: `highs` or `cbc`."""
    time_limit_s: float | None = 60.0
    """Seconds for everything, from the cuts to the baselines; None for no limit. docs/cost-model.md divides them."""
    confirm_s: float | None = 4.0
    """Seconds for the ILP to confirm a plan that the DP has proven optimal; None for what the time limit leaves."""
    gap: float = 0.0
    """Relative gap at which a solver may stop before it has proven its plan optimal."""
    maximum_cuts: int = MAXIMUM_CUTS
    certify: bool = True
    """Whether to record a certificate that `pipeplan check` can verify."""
    simulate: bool = True
    """Whether to simulate the plan, plans nearly as fast and the baselines, and to choose and compare by what is stated
    then."""
    simplest: float = 0.0
    """The share of the fastest plan's pace by which the simplest plan, which is taken, may be slower; 0 takes the
    fastest plan. The commands have `simplest.WITHIN`."""
    compare: bool = True
    """Whether to search for baselines where the plan is proven optimal by the formulas: the best straight pipeline, the
    best uniform grid, data parallelism on fewer workers. They are shown, and one is taken if it is faster in the
    simulation. Their searches may take longer than the plan's own."""
    jobs: int = 1
    """The most processes, this one included. Others search for baselines beside the solvers, if a search is long enough
    to start an interpreter for; a script needs its own code under `if __name__ == "__main__":` then. What is found does
    not depend on it, but where the time limit comes first."""


@dataclass(frozen=True, repr=False)
class Outcome:
    """A solved problem: its best plan, what is proven about the plan, and the baselines."""

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    results: tuple[Result, ...]
    verdict: Verdict
    baselines: tuple[Baseline, ...]
    phases_s: dict[str, float]
    """Wall-clock seconds by phase."""
    bound_s: float = 0.0
    """Lower bound on the pace of every plan of the searched space with everything charged, in seconds per minibatch."""
    certificate: Certificate = NO_CERTIFICATE
    simulation: PlanSimulation = NOT_SIMULATED
    """What a simulation of the plan's schedule says, beside the prediction."""
    synchrony: SynchronyChoice | None = None
    """The choice between synchronous and asynchronous plans, if it was left to pipeplan."""
    simplification: Simplification | None = None
    """The fastest plan, if a simpler one was taken."""
    run_size: RunSize = field(default_factory=RunSize)
    """The size of the training run, as far as the user states it."""

    def __repr__(self) -> str:
        return "\n".join(outcome_lines(self))

    def _repr_html_(self) -> str:
        return outcome_html(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each stage, with its layers, workers and costs in seconds and bytes: rows for a data frame."""
        return stage_rows(self)

    @property
    def objective_s(self) -> float:
        """The plan's pace by the formulas, which solvers minimise and prove, in seconds per minibatch."""
        return self.evaluation.pace_s

    @property
    def predicted_s(self) -> float:
        """The pace to expect, in seconds per minibatch: simulated where that differs from `objective_s`."""
        return self.simulation.pace_s(self.objective_s)

    @property
    def throughput(self) -> Throughput:
        """The pace to expect in the units of a training run."""
        problem = self.problem
        return throughput_of(self.plan, problem.profile, problem.cluster, self.predicted_s, self.run_size)

    @property
    def gap(self) -> float:
        """Upper bound on how much faster, as a fraction of the pace, a better plan could be."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0

    @property
    def status(self) -> Status:
        """`optimal` where the gap is at most 1e-6, else `feasible`."""
        return Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE


class Disagreement(DisagreementError):
    """Raised where the solvers contradict each other; `results` holds both plans."""

    def __init__(self, message: str, results: tuple[Result, ...]) -> None:
        super().__init__(message)
        self.results = results


def solve(
    problem: Problem,
    settings: Settings | None = None,
    *,
    report: Report | None = None,
    deadline: Deadline | None = None,
    known: Sequence[Plan] = (),
) -> Outcome:
    """Find the best plan for a problem, cross-check the solvers, and compare the plan with the baselines.

    Plans of the problem that are `known` are taken where the time limit comes before a faster one is found.

    The time limit, or Ctrl-C at any moment, ends the search with the best plan so far; what there was no time for says
    so. `report` is called with every change of phase, best plan and bound. A `deadline` that began earlier takes the
    place of the time limit. Raises `InfeasibleError` where no plan satisfies the constraints, `Disagreement` where the
    solvers contradict each other, `InputError` for settings that do not fit the problem, and `KeyboardInterrupt` if
    Ctrl-C came before there was a plan.
    """
    settings = settings or Settings()
    tracker = ProgressTracker(report)
    if problem.options.flushes and problem.options.schedule in VIRTUAL:
        return _solve_virtual(problem, settings, deadline or Deadline.after(settings.time_limit_s))
    means = _Means(settings, deadline or Deadline.after(settings.time_limit_s), tracker)
    search = _Search(problem, means, known)
    try:
        search.run()
    except KeyboardInterrupt:
        search.interrupted = True
    return search.outcome()


def _solve_virtual(problem: Problem, settings: Settings, deadline: Deadline) -> Outcome:
    """The outcome of a search for plans whose workers run several stages each, which has no certificate."""
    found = solve_with_virtual_stages(problem, settings.maximum_cuts, deadline)
    parts = found.plan, found.score, found.results, found.verdict, found.compared, found.phases_s
    certificate = Certificate(None, NO_PROOF) if settings.certify else NO_CERTIFICATE
    return Outcome(problem, *parts, found.bound_s, certificate, found.simulation)


@dataclass(frozen=True)
class _Means:
    """The settings and the deadline of a solve, and the tracker that it reports to."""

    settings: Settings
    deadline: Deadline
    tracker: ProgressTracker

    def share(self, phase: str) -> Deadline:
        """The deadline of a phase that begins now."""
        return self.deadline.share(SHARES[phase])


class _Search:
    """One solve: what each of its phases has found so far, so that it can end after any of them."""

    def __init__(self, problem: Problem, means: _Means, known: Sequence[Plan]) -> None:
        self._problem, self._means, self._known = problem, means, known
        self._phases: dict[str, float] = {}
        self._cuts: Cuts | None = None
        self._results: tuple[Result, ...] = ()
        self._best: tuple[Plan, Evaluation] | None = None
        self._certificate = STOPPED_CERTIFICATE
        self._quick: list[Baseline] = []
        self._compared: tuple[Baseline, ...] | None = None
        self._simulation = STOPPED if means.settings.simulate else NOT_SIMULATED
        self._simpler: SimplerPlan | None = None
        self._simplification: Simplification | None = None
        self.interrupted = False
        """Whether Ctrl-C came."""

    def run(self) -> None:
        """Run all phases. On Ctrl-C what has been found is kept, and `KeyboardInterrupt` raised."""
        problem, means = self._problem, self._means
        with self._phase("cuts"):
            self._cuts = cuts = enumerate_cuts(problem, means.settings.maximum_cuts, means.share("cuts"))
        with side_searches(problem, cuts, means.settings.jobs if self._compares else 1) as beside:
            self._run_with(cuts, beside)

    def _run_with(self, cuts: Cuts, beside: SideSearches | None) -> None:
        """Run all phases after the cuts, with the searches for baselines in processes `beside` this one if any."""
        problem, means = self._problem, self._means
        with self._phase("grid"):
            self._quick = [baselines.data_parallelism(problem)]
            if beside is not None:
                # The straight pipeline mostly takes longer.
                searches = baselines.straight_pipelines, baselines.quick_baselines
                beside.start(searches, means.deadline, SHARES["baselines"])
            elif self._compares:
                self._quick = baselines.quick_baselines(problem, cuts, means.share("grid"))
        self._results = results = _run_solvers(problem, cuts, means, self._known)
        self._phases.update({result.solver: result.seconds for result in results})
        _refuse_contradiction(problem, results)
        self._best = _best_plan(problem, cuts, means, results, self._known)
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt
        with self._phase("certificate"):
            if means.settings.certify:
                ends = means.share("certificate")
                self._certificate = certificate_of(problem, cuts, results, self._best[1], ends)
        if beside is not None and self._is_proven(self._best[1]):
            # Then no baseline takes the plan's place, so the search for a simpler one need not wait for them.
            self._phases["baselines"] = 0.0  # phases are listed in the same order in any case
            self._find_simpler(cuts)
            self._find_baselines(cuts, beside)
        else:
            self._find_baselines(cuts, beside)
            self._find_simpler(cuts)
        if means.settings.simulate:
            with self._phase("simulation"):
                self._simulate()
        elif self._simpler is not None:
            self._take_simpler(self._simpler, *self._finished())

    def _find_baselines(self, cuts: Cuts, beside: SideSearches | None) -> None:
        """Complete the baselines that are shown, or that may take the plan's place."""
        if not self._compares and self._is_proven(self._finished()[1]):
            self._compared = tuple(self._quick)
            return
        problem = self._problem
        with self._phase("baselines"):
            ends = self._means.share("baselines")
            if beside is not None:
                self._quick = beside.found(baselines.quick_baselines)
                self._compared = (*self._quick, *beside.found(baselines.straight_pipelines))
                return
            if not self._compares:
                self._quick = baselines.quick_baselines(problem, cuts, ends.share(0.5))
            self._compared = (*self._quick, *baselines.straight_pipelines(problem, cuts, ends))

    def _find_simpler(self, cuts: Cuts) -> None:
        """Search for a simpler plan that is nearly as fast, if one is to be taken."""
        within = self._means.settings.simplest
        if within > 0:
            with self._phase("simplest"):
                plan, score = self._finished()
                self._simpler = find_simpler(self._problem, cuts, plan, score, within, self._means.share("simplest"))

    @property
    def _compares(self) -> bool:
        """Whether baselines are shown, or may take the place of a plan that is proven optimal."""
        return self._means.settings.compare

    def _is_proven(self, score: Evaluation) -> bool:
        """Whether the solvers' bound shows that no plan is faster than one with this score."""
        return max(result.bound_s for result in self._results) >= score.pace_s * (1 - TOLERANCE)

    def _simulate(self) -> None:
        """Simulate the plan, and choose by stated paces among it, equally fast ones, a simpler one and baselines."""
        fastest = plan, score = self._finished()
        others = [Rival(f"the plan of the {result.solver}", result.plan) for result in self._results if result.plan]
        others += [Rival(one.name, one.plan) for one in self._baselines() if one.plan is not None and one.fits]
        ends = self._means.share("simulation")
        plan, score, told = choose_by_simulation(self._problem, plan, score, others, self._simpler, ends)
        self._best, self._simulation = (plan, score), told
        if self._simpler is not None and plan is self._simpler.plan:
            self._take_simpler(self._simpler, *fastest)
        elif score.pace_s > fastest[1].pace_s * (1 + TOLERANCE):
            self._simplification = Simplification(*fastest, None, kind_of(plan, self._problem))
        self._compared = state_baselines(self._baselines(), self._problem, plan, told, ends)

    def _take_simpler(self, simpler: SimplerPlan, fastest: Plan, score: Evaluation) -> None:
        """Take the simpler plan; the fastest plan is kept to compare with, unless both are equally fast."""
        self._best = simpler.plan, simpler.score
        if simpler.score.pace_s > score.pace_s * (1 + TOLERANCE):
            kind = kind_of(simpler.plan, self._problem)
            self._simplification = Simplification(fastest, score, simpler.within, kind)

    def _finished(self) -> tuple[Plan, Evaluation]:
        """The best plan, or a faster baseline where the search ended before it was finished.

        Raises `KeyboardInterrupt` if there is no plan.
        """
        plan, score = self._best or self._unfinished()
        if self._simplification is not None:
            return plan, score
        if not self._is_proven(score):
            known = [*self._known, *(one.plan for one in self._baselines() if one.plan is not None)]
            return _best_with_known(known, self._problem, plan, score)
        return plan, score

    def _baselines(self) -> tuple[Baseline, ...]:
        if self._compared is not None:
            return self._compared
        found = {one.name for one in self._quick}
        unsearched = baselines.unsearched_baselines(self._problem, baselines.STOPPED)
        return (*self._quick, *(one for one in unsearched if one.name not in found))

    def outcome(self) -> Outcome:
        """The outcome by what has been found. Raises `KeyboardInterrupt` if that is no plan."""
        problem, (plan, score) = self._problem, self._finished()
        certificate = self._certificate if self._means.settings.certify else NO_CERTIFICATE
        bound = min(max(result.bound_s for result in self._results), score.pace_s)
        bound = max(bound, contention.least_pace_of_shared_cores_s(problem))
        simplified = self._simplification
        compared = self._baselines()
        if simplified is not None:
            fastest = (simplified.baseline,)
            compared += state_baselines(fastest, problem, plan, self._simulation, self._means.share("simulation"))
        return Outcome(
            problem,
            plan,
            score,
            self._results,
            state_verdict(problem, score, bound, self._results, simplified),
            compared,
            self._phases,
            bound,
            certificate,
            self._simulation,
            simplification=simplified,
        )

    def _unfinished(self) -> tuple[Plan, Evaluation]:
        """The best plan of the solvers, where Ctrl-C came before it was taken."""
        if self._cuts is None:
            raise KeyboardInterrupt("the model's cuts were still being listed, so there is no plan yet")
        if all(result.plan is None for result in self._results):
            raise KeyboardInterrupt("no plan was found until then")
        _refuse_contradiction(self._problem, self._results)
        return _best_plan(self._problem, self._cuts, self._means, self._results, self._known, deepen=False)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Report the block as a phase, and record its wall-clock seconds."""
        self._means.tracker.phase(name)
        began = time.perf_counter()
        yield
        self._phases[name] = time.perf_counter() - began


def _refuse_contradiction(problem: Problem, results: tuple[Result, ...]) -> None:
    """Raise `Disagreement` if the solvers' results contradict each other."""
    if complaint := contradiction(problem, results):
        raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {complaint}", results)


def _best_plan(
    problem: Problem,
    cuts: Cuts,
    means: _Means,
    results: tuple[Result, ...],
    known: Sequence[Plan],
    *,
    deepen: bool = True,
) -> tuple[Plan, Evaluation]:
    """The best of the solvers' plans, with its score; `deepen` gives it the depths that bursts need.

    Where they found none in time, it is one of the plans that are `known`.

    Raises `InfeasibleError` if there is no plan, and `KeyboardInterrupt` if Ctrl-C came before any was found.
    """
    plans: list[Plan] = [result.plan for result in results if result.plan is not None]
    if all(result.status != Status.INFEASIBLE for result in results):
        plans = plans or list(known)
    if not plans:
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt("no plan was found until then")
        if all(result.status != Status.INFEASIBLE for result in results):
            raise InfeasibleError("no plan found within the time limit; give more with --time-limit, or --solver dp")
        means.tracker.phase("why no plan fits")
        raise InfeasibleError(why_infeasible(problem, cuts, means.share("diagnosis")))
    # Plans within the tolerance are equal: keep the first solver's, which has the fewest stages among its equals.
    scores = [evaluate(plan, problem) for plan in plans]
    least = min(score.pace_s for score in scores)
    plan, score = next(pair for pair in zip(plans, scores, strict=True) if pair[1].pace_s <= least * (1 + TOLERANCE))
    return deepened(plan, problem) if deepen else (plan, score)


def _best_with_known(known: Iterable[Plan], problem: Problem, plan: Plan, score: Evaluation) -> tuple[Plan, Evaluation]:
    """The plan and its score, or a faster known plan, for a search that ended before it was finished."""
    for candidate in known:
        if not satisfies_options(candidate, problem):
            continue
        candidate_score = evaluate(candidate, problem)
        if candidate_score.pace_s < score.pace_s * (1 - TOLERANCE) and (
            candidate_score.fits or not problem.options.memory
        ):
            plan, score = candidate, candidate_score
    return plan, score


def _run_solvers(problem: Problem, cuts: Cuts, means: _Means, known: Sequence[Plan]) -> tuple[Result, ...]:
    """The results of the solvers that the settings name, the DP first, which looks for nothing slower than `known`."""
    settings, tracker = means.settings, means.tracker
    results: list[Result] = []
    if settings.solver != "ilp":
        tracker.phase("DP")
        ends = means.share("last" if settings.solver == "dp" else "first")
        best_known = best_of_known(known, problem)
        useful_s = float("inf")
        if best_known is not None:
            useful_s = best_known.pace_s * USEFUL
            tracker.narrowed(0.0, best_known.pace_s)
        found = dynamic_program.solve(
            problem,
            cuts,
            ends.left_s,
            settings.gap,
            tracker.narrowed,
            useful_s=useful_s,
            near=best_known is not None,
            price=lambda plan: evaluate(plan, problem).pace_s,
        )
        results.append(charge_result(found, problem))
        # If the DP was interrupted, the user does not want to wait for a second solver.
        if settings.solver == "dp" or found.interrupted:
            return tuple(results)
        tracker.narrowed(results[0].bound_s if cuts.complete else 0.0, results[0].objective_s)
    tracker.phase("ILP")
    cutoff = results[0].objective_s if results and results[0].plan is not None else None
    proven = bool(results) and results[0].status == Status.OPTIMAL
    ends = means.deadline.share(SHARES["last"], settings.confirm_s if proven else None)
    limits = integer_program.IlpLimits(ends.left_s, settings.gap, settings.backend)
    results.append(charge_result(integer_program.solve(problem, limits, cutoff), problem))
    return tuple(results)
