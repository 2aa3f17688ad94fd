"""Computes the explanation of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.explanation import sensitivity
from pipeplan.explanation.second_best import Alternative, Alternatives, find_alternatives, with_figures
from pipeplan.explanation.sensitivity import ChangeEffect, Robustness, change_effects
from pipeplan.explanation.time_breakdown import ResourceLoad, TimeBreakdown, break_down_time, resource_loads
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import not_taken_because
from pipeplan.planning.choose import Choice
from pipeplan.planning.figure import figure_of
from pipeplan.planning.outcome import TOLERANCE, Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.diagnosis import Diagnosis
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline

FORMAT, VERSION = "pipeplan-explanation", 1
SIMULATING_S = 5.0
"""Time limit for simulating the second choice and further alternatives, in seconds."""


@dataclass(frozen=True)
class RobustnessSettings:
    """Settings of the robustness part of an explanation."""

    samples: int = 20
    """Number of times that the layers' times are drawn; 0 leaves robustness out."""
    seed: int = 0
    spread: float | None = None
    """Relative interquartile range to assume for every time; None for the measured range."""


@dataclass(frozen=True)
class Explanation:
    """All parts of the explanation of a plan."""

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    best: Outcome
    """The outcome of the solvers. Its plan is the explained plan, unless that was read from a file."""
    loads: tuple[ResourceLoad, ...]
    anatomies: tuple[TimeBreakdown, ...]
    """Breakdowns of the plan, of data parallelism, and of the best uniform grid if there is one."""
    alternatives: Alternatives
    effects: tuple[ChangeEffect, ...]
    robustness: Robustness | None
    """Robustness against the spread of the times; None if the profile has no spread."""
    step_s: float
    """The simulated step time of the plan, in seconds per minibatch."""
    proof: str = ""
    """A clause on faster plans: the solvers' verdict, or the result of checking a plan file."""

    @property
    def behind_best(self) -> float:
        """Relative slowdown of the plan against the best plan by the formulas; 0 within the tolerance."""
        behind = self.evaluation.step_time_s / self.best.evaluation.step_time_s - 1
        return behind if behind > TOLERANCE else 0.0


def explain_plan(
    problem: Problem,
    settings: Settings,
    drawings: RobustnessSettings,
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    proof: str | None = None,
    step_s: float | None = None,
    known: Sequence[Plan] = (),
    choice: Choice | None = None,
) -> Explanation:
    """Explain a plan; without `plan`, explain the plan that a solve finds.

    `proof` describes the proof for a given plan. `step_s` is the plan's step time in seconds per minibatch; without
    `step_s` the plan is simulated. `known` and `choice` are those of `solve`. Raises `InfeasibleError` if no plan fits.
    """
    progress("solving")
    best = solve(problem, settings, known=known, choice=choice)
    plan = best.plan if plan is None else plan
    score, cuts = evaluate(plan, problem), enumerate_cuts(problem, settings.maximum_cuts)
    if step_s is None:
        answered = plan == best.plan
        step_s = best.predicted_s if answered else figure_of(plan, score, problem, Deadline()).step_s
    anatomies = [break_down_time("this plan", plan, problem, step_s)]
    for baseline in best.baselines:
        if baseline.plan is not None:
            made = break_down_time(baseline.name, baseline.plan, problem, baseline.step_s)
            anatomies.append(replace(made, not_taken=not_taken_because(baseline, plan, step_s, problem)))
    others = find_alternatives(problem, cuts, plan, score.step_time_s, progress)
    others = with_figures(others, problem, Deadline.after(SIMULATING_S))
    changed = []
    for effect in change_effects(problem, cuts, best.evaluation.step_time_s):
        changed.append(effect)
        progress(f"trying other clusters: {effect.name.strip()}")
    return Explanation(
        problem=problem,
        plan=plan,
        evaluation=score,
        best=best,
        loads=tuple(resource_loads(plan, problem, score)),
        anatomies=tuple(anatomies),
        alternatives=others,
        effects=tuple(changed),
        step_s=step_s,
        proof=best.verdict.text if proof is None else proof,
        robustness=_robustness(problem, cuts, plan, drawings, progress),
    )


def _robustness(
    problem: Problem, cuts: Cuts, plan: Plan, drawings: RobustnessSettings, progress: Callable[[str], None]
) -> Robustness | None:
    if drawings.spread is not None:
        problem = replace(problem, profile=sensitivity.with_spread(problem.profile, drawings.spread))
    if drawings.samples == 0 or not sensitivity.has_spread(problem.profile):
        return None
    samples = []
    for sample in sensitivity.draw_samples(problem, cuts, plan, drawings.samples, drawings.seed):
        samples.append(sample)
        progress(f"drawing the times again: {len(samples)} of {drawings.samples}")
    return Robustness(tuple(samples), plan.config, drawings.seed, drawings.spread)


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """The document that `pipeplan explain --json` prints."""
    score, second = explanation.evaluation, explanation.alternatives.second
    return _document_head(explanation.problem, feasible=True) | {
        "plan": explanation.plan.to_json() | {"config": explanation.plan.config},
        "minibatch_s": score.step_time_s,
        "step_s": explanation.step_s,
        "bound_by": score.bound,
        "behind_best": explanation.behind_best,
        "best_config": explanation.best.plan.config,
        "proof": explanation.proof,
        "resources": [load._asdict() for load in explanation.loads],
        "comparison": [asdict(anatomy) | {"sent_bytes": anatomy.sent_bytes} for anatomy in explanation.anatomies],
        "second_choice": None if second is None else _alternative_json(second),
        "second_choice_exact": explanation.alternatives.exact,
        "alternatives": [_alternative_json(alternative) for alternative in explanation.alternatives.found],
        "searched": list(explanation.alternatives.searched),
        "what_if": [
            {
                "change": effect.name.strip(),
                "minibatch_s": effect.step_time_s,
                "gain": effect.gain,
                "config": effect.config,
                "remark": effect.remark,
            }
            for effect in explanation.effects
        ],
        "robustness": _robustness_json(explanation.robustness),
    }


def _document_head(problem: Problem, *, feasible: bool) -> dict[str, Any]:
    """The common first fields of the documents of all explanations."""
    profile = problem.profile
    return {
        "format": FORMAT,
        "version": VERSION,
        "feasible": feasible,
        "profile": {"digest": profile.digest(), "model": profile.model_name, "minibatch": profile.minibatch},
        "cluster": problem.cluster.name,
    }


def diagnosis_json(problem: Problem, diagnosis: Diagnosis) -> dict[str, Any]:
    """The document that `pipeplan explain --json` prints if there is no plan."""
    enough, growth = diagnosis.enough, diagnosis.growth
    return _document_head(problem, feasible=False) | {
        "why": diagnosis.text,
        "capacity_bytes": diagnosis.capacity_bytes if problem.options.memory else None,
        "oversized": [
            {"layers": list(group.layers), "needs_bytes": group.needs_bytes, "missing_bytes": group.missing_bytes}
            for group in diagnosis.oversized
        ],
        "enough_memory": None
        if enough is None
        else {"bytes": enough.memory_bytes, "config": enough.plan.config, "stage": enough.stage},
        "enough_machines": None if growth is None else {"unit": growth.unit, "count": growth.count, "now": growth.now},
        "relaxed": list(diagnosis.relaxed),
    }


def _alternative_json(one: Alternative) -> dict[str, Any]:
    figures = {"minibatch_s": one.step_time_s, "step_s": one.step_s, "behind": one.behind, "part": one.part}
    return {"config": one.plan.config} | figures


def _robustness_json(robustness: Robustness | None) -> dict[str, Any] | None:
    if robustness is None:
        return None
    return {
        "samples": len(robustness.samples),
        "seed": robustness.seed,
        "assumed_spread": robustness.assumed,
        "stays_best": robustness.stays_best,
        "same_config": robustness.same_config,
        "median_behind": robustness.median,
        "worst_behind": robustness.worst,
        "rivals": [{"config": config, "times": times} for config, times in robustness.rivals],
    }
