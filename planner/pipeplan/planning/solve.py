"""Solves a problem: runs the solvers, certifies the plan, and compares it with the baselines, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import VIRTUAL
from pipeplan.planning import baselines
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.beside import SideSearches, side_searches
from pipeplan.planning.certify import certificate_of
from pipeplan.planning.outcome import NO_CERTIFICATE, Outcome
from pipeplan.planning.progress import ProgressTracker, Report
from pipeplan.planning.run_solvers import Means, best_plan, best_with_known, refuse_contradiction, run_solvers
from pipeplan.planning.settings import SHARES, Settings
from pipeplan.planning.simplest import SimplerPlan, Simplification, find_simpler, kind_of
from pipeplan.planning.stated.choose import Rival, choose_by_simulation
from pipeplan.planning.stated.comparisons import state_baselines
from pipeplan.planning.stated.pace import NOT_SIMULATED, STOPPED
from pipeplan.planning.verdict import TOLERANCE, state_verdict
from pipeplan.planning.virtual_stages.solve_virtual import NO_PROOF, solve_with_virtual_stages
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.certificate import Certificate
from pipeplan.solvers.result import Result
from pipeplan.util.deadline import Deadline

STOPPED_CERTIFICATE = Certificate(None, "Ctrl-C came before a certificate was made")


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
    means = Means(settings, deadline or Deadline.after(settings.time_limit_s), tracker)
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


class _Search:
    """One solve: what each of its phases has found so far, so that it can end after any of them."""

    def __init__(self, problem: Problem, means: Means, known: Sequence[Plan]) -> None:
        self._problem, self._means, self._known = problem, means, known
        self._phases: dict[str, float] = {}
        self._cuts: Cuts | None = None
        self._results: tuple[Result, ...] = ()
        self._best: tuple[Plan, Evaluation] | None = None
        self._certificate = STOPPED_CERTIFICATE
        self._uniform: list[Baseline] = []
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
        self._uniform = [baselines.data_parallelism(problem)]
        if beside is not None:
            # The straight pipeline mostly takes longer.
            searches = baselines.straight_pipelines, baselines.uniform_baselines
            beside.start(searches, means.deadline, SHARES["baselines"])
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
        if beside is not None and self._is_proven(self._best[1]):
            # Then no baseline takes the plan's place, so the search for a simpler one need not wait for them.
            self._phases |= {"grid": 0.0, "baselines": 0.0}  # phases are listed in the same order in any case
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
            self._compared = tuple(self._uniform)
            return
        if beside is not None:
            self._phases["grid"] = 0.0
            with self._phase("baselines"):
                self._uniform = beside.found(baselines.uniform_baselines)
                self._compared = (*self._uniform, *beside.found(baselines.straight_pipelines))
            return
        # They come after the solvers, which have a plan and a bound sooner.
        with self._phase("grid"):
            self._uniform = baselines.uniform_baselines(self._problem, cuts, self._means.share("grid"))
        with self._phase("baselines"):
            straight = baselines.straight_pipelines(self._problem, cuts, self._means.share("baselines"))
            self._compared = (*self._uniform, *straight)

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
            return best_with_known(known, self._problem, plan, score)
        return plan, score

    def _baselines(self) -> tuple[Baseline, ...]:
        if self._compared is not None:
            return self._compared
        found = {one.name for one in self._uniform}
        unsearched = baselines.unsearched_baselines(self._problem, baselines.STOPPED)
        return (*self._uniform, *(one for one in unsearched if one.name not in found))

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
        refuse_contradiction(self._problem, self._results)
        return best_plan(self._problem, self._cuts, self._means, self._results, self._known, deepen=False)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Report the block as a phase, and record its wall-clock seconds."""
        self._means.tracker.phase(name)
        began = time.perf_counter()
        yield
        self._phases[name] = time.perf_counter() - began
