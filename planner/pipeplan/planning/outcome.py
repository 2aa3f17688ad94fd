"""The outcome of a solve: the plan, what is proven about it, its baselines, and its display in Python.

Every plan that pipeplan recommends has passed the cross-check of both solvers' results.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeplan.cost import contention
from pipeplan.cost.evaluate import STAGE_FIGURES, Evaluation, evaluate
from pipeplan.cost.throughput import RunSize, Throughput, throughput_of
from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import Updates
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.choose import Choice
from pipeplan.planning.figure import Figure
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.certificate import Certificate
from pipeplan.solvers.result import Result, Status
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_step_time, show_time

TOLERANCE = 1e-6
"""Relative difference below which plans are equal for the verdict. Both solvers work to a thousandth of this
tolerance."""


@dataclass(frozen=True)
class Verdict:
    """The statement of what is proven about a plan, with all costs charged."""

    agree: bool
    """Whether the solvers' answers are free of contradictions. A plan with contradictions is not written."""
    proven: bool
    """Whether two solvers, or an argument that needs no solver, show how much faster another plan could be."""
    text: str
    """One sentence for the user."""
    provers: tuple[str, ...] = ()
    """The solvers that show the bound."""


def state_verdict(problem: Problem, step_s: float, bound_s: float, results: Sequence[Result]) -> Verdict:
    """The verdict on a plan with this step time.

    `bound_s` is a lower bound on the step time of every plan of the searched space, in seconds per minibatch.
    """
    return verdict_of(step_s, bound_s, results, contention.least_step_time_of_shared_cores_s(problem))


def verdict_of(step_s: float, bound_s: float, results: Sequence[Result], cores_s: float = 0.0) -> Verdict:
    """The verdict on a plan; `cores_s` is the step time that keeps all shared cores busy, 0 if none are shared.

    The bound is proven if two solvers show it, or if the shared cores are never idle at that step time.
    """
    reaches = bound_s * (1 - TOLERANCE)
    provers = tuple(result.solver for result in results if result.bound_s >= reaches)
    if not bound_s > 0:
        return Verdict(True, False, "not proven: how much faster another plan could be is not known", provers)
    others = [result for result in results if result.solver not in provers]
    if len(provers) > 1:
        reason = f"{' and '.join(provers)} agree on the bound"
    elif cores_s >= reaches:
        reason = "the cores that the workers share are never idle at the bound"
    else:
        reason = f"{provers[0]} shows the bound" if provers else "the bound is weaker than a solver's"
        reason += f", and {_unconfirmed(others[0])}" if others else ", and no second solver was asked"
    proven, gap = len(provers) > 1 or cores_s >= reaches, gap_of(step_s, bound_s)
    faster = "faster" if gap <= TOLERANCE else f"more than {percent(gap)} faster"
    text = f"{'proven' if proven else 'not confirmed'}: no plan of the searched space is {faster}; {reason}"
    return Verdict(True, proven, text, provers)


def _unconfirmed(result: Result) -> str:
    """A clause that says why a solver does not confirm the bound."""
    bound = f"its bound is {show_time(result.bound_s)}" if 0 < result.bound_s < math.inf else ""
    if math.isfinite(result.objective_s):
        why = ", and ".join(filter(None, [bound or f"its bound is {show_time(result.bound_s)}", result.note]))
    else:
        why = "; ".join(filter(None, [result.note or "it found no plan within the time limit", bound]))
    return f"{result.solver} does not confirm it: {why}"


def search_verdict(step_s: float, bound_s: float) -> Verdict:
    """The verdict on a plan whose workers run several stages each. A search has found this plan.

    `bound_s` is a lower bound on all plans of the plan's schedule, in seconds per minibatch.
    """
    longer = gap_of(step_s, bound_s) if bound_s else 0.0
    text = (
        f"not proven: a search found the plan; it takes {longer:.1%} longer than a bound on all plans of this "
        "schedule, in which nobody waits"
    )
    return Verdict(True, False, text)


def gap_of(step_s: float, bound_s: float) -> float:
    """Relative gap between a step time and its lower bound, at least 0. No plan is faster by more than this gap."""
    return max(0.0, step_s / bound_s - 1.0) if bound_s > 0 else math.inf


def percent(share: float) -> str:
    """A share in percent, with enough digits to differ from 0."""
    return f"{share:.1%}" if share >= 1e-3 or share == 0 else f"{share * 100:.1g}%"


def contradiction(problem: Problem, results: Sequence[Result]) -> str:
    """A complaint if solvers contradict the evaluator or each other, else an empty text."""
    scores = [None if result.plan is None else evaluate(result.plan, problem) for result in results]
    for result, score in zip(results, scores, strict=True):
        if score is not None and (complaint := _wrong_objective(result, score)):
            return complaint
    for rival in results:
        for result, score in zip(results, scores, strict=True):
            if result is not rival and score is not None and (complaint := _beaten_bound(result, score, rival)):
                return complaint
    return ""


def _wrong_objective(result: Result, score: Evaluation) -> str:
    """A complaint if a solver's objective differs from the evaluator's score of its plan, else an empty text."""
    step_time_s = score.step_time_s if result.charged else score.alone_s
    if abs(step_time_s - result.objective_s) > TOLERANCE * step_time_s:
        return (
            f"{result.solver} claims {result.objective_s:.9g} s per minibatch, but its plan takes {step_time_s:.9g} s"
        )
    if not score.fits:
        return f"{result.solver} returned a plan that does not fit in memory"
    return ""


def _beaten_bound(result: Result, score: Evaluation, rival: Result) -> str:
    """A complaint if `rival` proved that the plan of `result`, with this score, cannot exist; else an empty text."""
    if rival.status == Status.INFEASIBLE:
        return (
            f"{rival.solver} claims that there is no plan, but {result.solver} found one of {result.objective_s:.9g} s"
        )
    step_time_s = score.step_time_s if rival.charged else score.alone_s
    if step_time_s < rival.bound_s * (1 - TOLERANCE):
        return (
            f"{result.solver} found a plan of {step_time_s:.9g} s per minibatch, faster than the bound that "
            f"{rival.solver} claims, {rival.bound_s:.9g} s"
        )
    return ""


NO_CERTIFICATE = Certificate(None, "no certificate was requested")


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
    """Lower bound on the step time of every plan of the searched space, in seconds per minibatch."""
    certificate: Certificate = NO_CERTIFICATE
    figure: Figure = field(default_factory=lambda: Figure(0.0))
    """The plan's figure: its step time, simulated and by the formulas."""
    choice: Choice | None = None
    """The candidates among which pipeplan chose the plan; None if the user fixed the problem."""
    run_size: RunSize = field(default_factory=RunSize)
    """The size of the training run, as far as the user gives it."""

    def __repr__(self) -> str:
        return "\n".join(outcome_lines(self))

    def _repr_html_(self) -> str:
        first, *others = map(html.escape, outcome_lines(self))
        rows = [_cells("th", _COLUMNS), *(_cells("td", _shown(row)) for row in self.rows())]
        return f"<p><b>{first}</b><br>{'<br>'.join(others)}</p><table>{''.join(rows)}</table>"

    def rows(self) -> list[dict[str, Any]]:
        """Rows for a data frame, one for each stage, with its layers, workers, and costs in seconds and bytes."""
        cluster = self.problem.cluster
        return [
            {
                "stage": number,
                "layers": list(stage.layers),
                "replicas": stage.replicas,
                "workers": list(stage.workers),
                "servers": sorted({cluster.server_of(worker) for worker in stage.workers}),
                "depth": stage.depth,
                "recompute": stage.recompute,
                **{name: getattr(cost, name) for name in STAGE_FIGURES},
            }
            for number, (stage, cost) in enumerate(zip(self.plan.stages, self.evaluation.stages, strict=True), 1)
        ]

    @property
    def objective_s(self) -> float:
        """The plan's step time by the formulas, in seconds per minibatch. The solvers minimise this lower bound."""
        return self.evaluation.step_time_s

    @property
    def predicted_s(self) -> float:
        """The plan's figure: its simulated step time, in seconds per minibatch."""
        return max(self.figure.step_s, self.objective_s)

    @property
    def throughput(self) -> Throughput:
        """The throughput to expect, in the units of a training run."""
        problem = self.problem
        return throughput_of(self.plan, problem.profile, problem.cluster, self.predicted_s, self.run_size)

    @property
    def gap(self) -> float:
        """Upper bound on how much faster a better plan could be: the step time over the bound, minus 1.

        The gap is infinite if the bound is 0.
        """
        return gap_of(self.predicted_s, self.bound_s)

    @property
    def status(self) -> Status:
        """`optimal` where the gap is at most 1e-6, else `feasible`."""
        return Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE


_COLUMNS = ("stage", "layers", "replicas", "servers", "depth", "compute", "sync", "to next", "memory")


def outcome_lines(outcome: Outcome) -> list[str]:
    """The plan, its updates, its step time, its gains and the verdict: five lines without control characters."""
    plan, score, problem = outcome.plan, outcome.evaluation, outcome.problem
    minibatch, cluster = problem.profile.minibatch, problem.cluster
    purpose = "inference" if plan.inference else "training"
    updates = "Inference: the forward pass only." if plan.inference else Updates.of(plan, minibatch).text
    gains = [(one.name, one.gain(outcome.predicted_s)) for one in outcome.baselines]
    where = f"on cluster {cluster.name} ({plan.busy} of {cluster.workers} workers)"
    rate = 1 / outcome.predicted_s if outcome.predicted_s > 0 else float("inf")
    rates = f"{show_time(outcome.predicted_s)} each, {show_step_time(rate * minibatch)} samples/s"
    bound = f"bound by {score.bound}" if outcome.predicted_s == score.step_time_s else "simulated"
    known = ", ".join(f"{gain:.2f}x over {name}" for name, gain in gains if gain is not None)
    lines = (
        f"Plan {plan.config} for {purpose} {problem.profile.model_name}, minibatch {minibatch}, {where}",
        updates,
        f"Predicted: {show_step_time(rate)} minibatches/s ({rates}), {bound}",
        f"Gains: {known or 'none known'}",
        f"Verdict: {outcome.verdict.text}",
    )
    return [one_line(line) for line in lines]


def _cells(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(one_line(cell))}</{tag}>' for cell in cells)}</tr>"


def _shown(row: dict[str, Any]) -> list[object]:
    layers = row["layers"]
    return [
        row["stage"],
        layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)})",
        row["replicas"],
        ", ".join(map(str, row["servers"])),
        row["depth"],
        show_time(row["compute_s"]),
        show_time(row["synchronisation_s"]),
        show_size(row["boundary_bytes"]) if row["boundary_level"] else "",
        show_size(row["memory_bytes"]),
    ]
