"""Solves a problem: runs the solvers, cross-checks them, improves the plan, and compares it with the baselines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import DisagreementError, InfeasibleError
from pipeplan.plan.plan import Plan
from pipeplan.planning import baselines, single_stage
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.infeasibility import why_infeasible
from pipeplan.planning.local_search import improve_plan, satisfies_options
from pipeplan.planning.progress import ProgressTracker, Report
from pipeplan.planning.verdict import TOLERANCE, Verdict, judge_results
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.certificate import Certificate, make_certificate
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
    "first": 0.5,
    "last": 0.8,
    "certificate": 0.5,
    "baselines": 1.0,
    "diagnosis": 1.0,
}
"""The share of the time left that each phase may take: the choice of a schedule, a minibatch size or a number of
workers, the cuts, the first of two solvers, the last or only solver, the certificate, the baselines. Where there is no
plan, the diagnosis takes what the solvers leave. What a phase does not need is left to those after it."""


@dataclass(frozen=True)
class Settings:
    """The solvers to run and their limits."""

    solver: str = "both"
    """`dp`, `ilp` or `both`."""
    backend: str = "highs"
    """The solver of the integer program: `highs` or `cbc`."""
    time_limit_s: float | None = 60.0
    """Seconds for everything, from the cuts to the baselines; None for no limit. docs/cost-model.md divides them."""
    gap: float = 0.0
    """Relative gap at which a solver may stop before it has proven its plan optimal."""
    maximum_cuts: int = MAXIMUM_CUTS
    certify: bool = True
    """Whether to record a certificate that `pipeplan check` can verify."""


@dataclass(frozen=True)
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
    """Lower bound on the pace of every plan in the searched space, in seconds per minibatch. Of the effects of
    contention it includes only that of cores that workers share."""
    certificate: Certificate = NO_CERTIFICATE

    @property
    def objective_s(self) -> float:
        """The plan's pace, in seconds per minibatch."""
        return self.evaluation.pace_s

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
) -> Outcome:
    """Find the best plan for a problem, cross-check the solvers, and compare the plan with the baselines.

    The time limit, or Ctrl-C at any moment, ends the search with the best plan so far; what there was no time for says
    so. `report` is called with every change of phase, best plan and bound. A `deadline` that began earlier takes the
    place of the time limit. Raises `InfeasibleError` where no plan satisfies the constraints, `Disagreement` where the
    solvers contradict each other, `InputError` for settings that do not fit the problem, and `KeyboardInterrupt` if
    Ctrl-C came before there was a plan.
    """
    settings = settings or Settings()
    tracker = ProgressTracker(report)
    means = _Means(settings, deadline or Deadline.after(settings.time_limit_s), tracker)
    search = _Search(problem, means)
    try:
        search.run()
    except KeyboardInterrupt:
        search.interrupted = True
    return search.outcome()


@dataclass(frozen=True)
class _Means:
    """What a solve may use, and whom it tells."""

    settings: Settings
    deadline: Deadline
    tracker: ProgressTracker

    def share(self, phase: str) -> Deadline:
        """The deadline of a phase that begins now."""
        return self.deadline.share(SHARES[phase])


class _Search:
    """One solve: what each of its phases has found so far, so that it can end after any of them."""

    def __init__(self, problem: Problem, means: _Means) -> None:
        self._problem, self._means = problem, means
        self._phases: dict[str, float] = {}
        self._cuts: Cuts | None = None
        self._results: tuple[Result, ...] = ()
        self._answer: _Answer | None = None
        self._certificate = STOPPED_CERTIFICATE
        self._compared: tuple[Baseline, ...] | None = None
        self.interrupted = False
        """Whether Ctrl-C came."""

    def run(self) -> None:
        """Run all phases. On Ctrl-C what has been found is kept, and `KeyboardInterrupt` raised."""
        problem, means = self._problem, self._means
        with self._phase("cuts"):
            self._cuts = cuts = enumerate_cuts(problem, means.settings.maximum_cuts, means.share("cuts"))
        self._results = results = _run_solvers(problem, cuts, means)
        self._phases.update({result.solver: result.seconds for result in results})
        verdict = _agreed_verdict(problem, results)
        with self._phase("contention"):
            self._answer = answer = _improve_answer(problem, cuts, means, results, verdict)
        if any(
            single_stage.is_bound_by_allreduce(result.plan, evaluate(result.plan, problem))
            for result in results
            if result.plan is not None
        ):
            with self._phase("one stage"):
                self._answer = answer = _with_single_stage(problem, cuts, means, answer)
        if any(result.interrupted for result in (*results, *answer.results)):
            raise KeyboardInterrupt
        with self._phase("certificate"):
            self._certificate = _certificate(cuts, means, answer)
        with self._phase("baselines"):
            effort = max(result.effort for result in (*results, *answer.results))
            self._compared = tuple(baselines.compute_baselines(problem, cuts, effort, means.share("baselines")))

    def outcome(self) -> Outcome:
        """The outcome by what has been found. Raises `KeyboardInterrupt` if that is no plan."""
        problem, answer = self._problem, self._answer or self._unimproved()
        compared = self._compared or tuple(baselines.unsearched_baselines(problem, baselines.STOPPED))
        certificate = self._certificate if self._means.settings.certify else NO_CERTIFICATE
        bound = max(answer.bound_s, contention.least_pace_of_shared_cores_s(problem))
        plan, score = _best_with_baselines(compared, problem, answer.plan, answer.score)
        return Outcome(problem, plan, score, answer.results, answer.verdict, compared, self._phases, bound, certificate)

    def _unimproved(self) -> _Answer:
        """The solvers' answer as it is, because Ctrl-C came while it was improved."""
        if self._cuts is None:
            raise KeyboardInterrupt("the model's cuts were still being listed, so there is no plan yet")
        if all(result.plan is None for result in self._results):
            raise KeyboardInterrupt("no plan was found until then")
        verdict = _agreed_verdict(self._problem, self._results)
        return _improve_answer(self._problem, self._cuts, self._means, self._results, verdict, improve=False)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Report the block as a phase, and record its wall-clock seconds."""
        self._means.tracker.phase(name)
        began = time.perf_counter()
        yield
        self._phases[name] = time.perf_counter() - began


def _agreed_verdict(problem: Problem, results: tuple[Result, ...]) -> Verdict:
    """The verdict on the solvers' results. Raises `Disagreement` if they contradict each other."""
    verdict = judge_results(problem, list(results))
    if not verdict.agree:
        raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {verdict.text}", results)
    return verdict


@dataclass(frozen=True)
class _Answer:
    """The best plan so far and what is proven about all others."""

    problem: Problem
    """The problem that the solvers solved, without plans of one stage where those are scored one by one."""
    plan: Plan
    score: Evaluation
    results: tuple[Result, ...]
    verdict: Verdict
    bound_s: float
    proven_s: float | None
    """A bound that a certificate can prove, in seconds per minibatch; None where the plan is not proven optimal."""


def _certificate(cuts: Cuts, means: _Means, answer: _Answer) -> Certificate:
    """The certificate of an answer that is proven optimal, or the reason why there is none."""
    if not means.settings.certify:
        return NO_CERTIFICATE
    if answer.proven_s is None:
        return Certificate(None, "the plan is not proven optimal")
    return make_certificate(answer.problem, cuts, answer.proven_s, means.share("certificate"))


def _improve_answer(
    problem: Problem,
    cuts: Cuts,
    means: _Means,
    results: tuple[Result, ...],
    verdict: Verdict,
    *,
    improve: bool = True,
) -> _Answer:
    """Improve the solvers' best plan where its transfers share network cards or its workers share cores."""
    plan, score = _best_plan(problem, cuts, means, results, improve=improve)
    bound = max(result.bound_s for result in results)
    proven = bound >= min(result.objective_s for result in results) * (1 - TOLERANCE)
    least = min(bound, score.alone_s, *_objectives(results)) if proven else None
    return _Answer(
        problem,
        plan,
        score,
        results,
        _verdict_under_contention(problem, score, verdict, _objectives(results)),
        bound,
        least,
    )


def _with_single_stage(problem: Problem, cuts: Cuts, means: _Means, first: _Answer) -> _Answer:
    """Combine the plans of one stage, whose update is exposed, with the solvers' answer for several stages."""
    single_best = single_stage.best_single_stage(problem)
    if single_best is None:
        return first
    # The local search near the solvers' plan may have found a faster plan than the best of one stage.
    plan, score = single_best if single_best[1].pace_s <= first.score.pace_s else (first.plan, first.score)
    several_problem, remaining = single_stage.without_single_stage(problem), _may_go_on(means, first.results)
    results: tuple[Result, ...] = ()
    if remaining and single_stage.allows_several(problem):
        # What bounds these plans does not bound those of one stage, so nothing is reported.
        results = _run_solvers(several_problem, cuts, replace(means, tracker=ProgressTracker()))
    if any(result.plan is not None for result in results):
        verdict = _agreed_verdict(several_problem, results)
        several_answer = _improve_answer(several_problem, cuts, means, results, verdict)
        bound = min(several_answer.bound_s, score.pace_s)
        proven = None if several_answer.proven_s is None else min(several_answer.proven_s, score.pace_s)
        if several_answer.score.pace_s < score.pace_s * (1 - TOLERANCE):
            return replace(several_answer, bound_s=bound, proven_s=proven)
        text = f"{several_answer.verdict.text}; plans of one stage were scored one by one"
        # A plan of several stages has further constraints, which only make it slower, so the bound still holds.
        closed = bound >= score.pace_s * (1 - TOLERANCE)
        if closed and verdict.proven:
            text = f"{verdict.text} on plans of several stages; plans of one stage were scored one by one"
        return _Answer(
            several_problem, plan, score, results, Verdict(True, closed and verdict.proven, text), bound, proven
        )
    certain = remaining and all(result.status == Status.INFEASIBLE for result in results)
    if certain:
        text = "proven optimal: only plans of one stage are possible, and all of them were scored"
    elif any(result.interrupted for result in (*first.results, *results)):
        text = "stopped by Ctrl-C before plans of several stages were searched"
    else:
        text = "the solvers found no plan of several stages within the time limit"
    verdict = Verdict(True, certain, text)
    bound = score.pace_s if certain else first.bound_s
    return _Answer(several_problem, plan, score, results or first.results, verdict, bound, bound if certain else None)


def _may_go_on(means: _Means, results: tuple[Result, ...]) -> bool:
    """Whether there is time left, and no Ctrl-C ended these results."""
    return not means.deadline.passed and not any(result.interrupted for result in results)


def _verdict_under_contention(
    problem: Problem, score: Evaluation, verdict: Verdict, objectives: list[float]
) -> Verdict:
    """The verdict once contention is considered, which both solvers leave out, for a plan with this score."""
    # A plan from the local search need not be the one that the solvers agree on, though it may keep to its bound.
    if score.pace_s <= min(score.alone_s, *objectives) * (1 + TOLERANCE):
        return verdict
    if score.pace_s <= contention.least_pace_of_shared_cores_s(problem) * (1 + TOLERANCE):
        return Verdict(verdict.agree, True, "proven optimal: the cores that the workers share are never idle")
    shared = "cores" if problem.cluster.shared_cores else "network cards"
    return Verdict(verdict.agree, False, f"{verdict.text}; this ignores contention for {shared}")


def _objectives(results: tuple[Result, ...]) -> list[float]:
    return [result.objective_s for result in results if result.plan is not None]


def _best_plan(
    problem: Problem, cuts: Cuts, means: _Means, results: tuple[Result, ...], *, improve: bool
) -> tuple[Plan, Evaluation]:
    """The best of the solvers' plans under contention, improved by the local search.

    Raises `InfeasibleError` if there is no plan, and `KeyboardInterrupt` if Ctrl-C came before any was found.
    """
    plans: list[Plan] = [result.plan for result in results if result.plan is not None]
    if not plans:
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt("no plan was found until then")
        if all(result.status != Status.INFEASIBLE for result in results):
            raise InfeasibleError("no plan found within the time limit; give more with --time-limit, or --solver dp")
        means.tracker.phase("why no plan fits")
        raise InfeasibleError(why_infeasible(problem, cuts, means.share("diagnosis")))
    if improve and problem.options.grid and (grid_plan := _best_shape(problem, cuts, means, results)):
        plans.append(grid_plan)
    # Plans within the tolerance are equal: keep the first solver's, which has the fewest stages among its equals.
    scores = [evaluate(plan, problem) for plan in plans]
    least = min(score.pace_s for score in scores)
    plan, score = next(pair for pair in zip(plans, scores, strict=True) if pair[1].pace_s <= least * (1 + TOLERANCE))
    better = improve_plan(plan, problem) if improve else plan
    return (plan, score) if better is plan else (better, evaluate(better, problem))


def _best_shape(problem: Problem, cuts: Cuts, means: _Means, results: tuple[Result, ...]) -> Plan | None:
    """The uniform grid that is fastest under contention, over the best grid of every shape; None if it cannot matter.

    The local search does not go from one shape to another. This search takes what is left of the time limit.
    """
    if not _may_go_on(means, results) or not cuts.complete:
        return None
    scores = [evaluate(result.plan, problem) for result in results if result.plan is not None]
    if any(score.pace_s <= score.alone_s * (1 + TOLERANCE) for score in scores):
        return None
    ends = means.share("last")
    return dynamic_program.best_uniform_grid(problem, cuts, lambda plan: evaluate(plan, problem).pace_s, ends.at)


def _best_with_baselines(
    compared: Iterable[Baseline], problem: Problem, plan: Plan, score: Evaluation
) -> tuple[Plan, Evaluation]:
    """The plan and its score, or a faster baseline: under contention the local search may miss so simple a plan."""
    if score.pace_s <= score.alone_s * (1 + TOLERANCE):
        return plan, score
    for candidate in (baseline.plan for baseline in compared):
        if candidate is None or not satisfies_options(candidate, problem):
            continue
        candidate_score = evaluate(candidate, problem)
        if candidate_score.pace_s < score.pace_s * (1 - TOLERANCE) and (
            candidate_score.fits or not problem.options.memory
        ):
            plan, score = candidate, candidate_score
    return plan, score


def _run_solvers(problem: Problem, cuts: Cuts, means: _Means) -> tuple[Result, ...]:
    """The results of the solvers that the settings name, the DP first."""
    settings, tracker = means.settings, means.tracker
    results: list[Result] = []
    if settings.solver != "ilp":
        tracker.phase("DP")
        ends = means.share("last" if settings.solver == "dp" else "first")
        results.append(dynamic_program.solve(problem, cuts, ends.left_s, settings.gap, tracker.narrowed))
        # If the DP was interrupted, the user does not want to wait for a second solver.
        if settings.solver == "dp" or results[0].interrupted:
            return tuple(results)
        tracker.narrowed(results[0].bound_s if cuts.complete else 0.0, results[0].objective_s)
    tracker.phase("ILP")
    cutoff = results[0].objective_s if results and results[0].plan is not None else None
    limits = integer_program.IlpLimits(means.share("last").left_s, settings.gap, settings.backend)
    results.append(integer_program.solve(problem, limits, cutoff))
    return tuple(results)
