"""Comparison of the plan with its alternatives, and the proof that none is faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeplan.checker.claims import NOT_SHOWN
from pipeplan.drawing import tables
from pipeplan.planning.outcome import TOLERANCE, percent
from pipeplan.problem.plan_file import PlanBaseline, PlanChoice, PlanRival
from pipeplan.report.document import Comparison
from pipeplan.report.source import ReportSource
from pipeplan.util.text import one_line

BEST = "best "
"""Names of baselines begin with this text if plan.json calls them the best of their kind."""
MAX_CONFIG_LENGTH = 24
"""Largest number of characters of a configuration. A longer one is described by its number of stages."""
SEARCHED_SPACE = (
    "The searched space has all pipelines whose stages follow the order of the worker numbers, each on consecutive "
    "workers, and copies of such a pipeline in all components of a level."
)
COVERED = "`pipeplan solve` writes a certificate for plans that keep whole weights, if checking it takes only seconds."
WIDER = "Over all microbatch sizes and kinds of plans the answer claims less: none is more than {} faster."
LIMITS = (
    "This is about the predicted times: the profile's figures, the cluster's rates and the cost model. "
    "It says nothing about the times that a run will measure."
)


def comparison_rows(source: ReportSource) -> list[Comparison]:
    """This plan and the rivals in plan.json. Plans for a named schedule have baselines instead of rivals.

    `pipeplan check` does not verify these figures, and the sentences of the report say so.
    """
    rows = [Comparison("this plan", source.name, source.stated.step_s, 1.0, "")]
    if source.stated.choice is not None:
        return [*rows, *_rivals(source, source.stated.choice)]
    for one in source.stated.baselines:
        name = one_line(one.name.removeprefix(BEST))
        rows.append(Comparison(name, short_config(one.config), one.step_time_s, one.gain, _remark(one)))
    return rows


def _rivals(source: ReportSource, choice: PlanChoice) -> Iterator[Comparison]:
    """All rivals except the plan itself, and the best plans with old and with rounded gradients."""
    own = source.plan.config, source.plan.schedule, source.microbatch, source.stated.data_parallel
    for one in [*choice.rivals, *filter(None, [choice.rounded, choice.stale])]:
        other = one is choice.rounded or (one.config, one.schedule, one.minibatch, one.data_parallel) != own
        if other and one.samples_per_s > 0:
            seconds = source.microbatch / one.samples_per_s
            alone = one.data_parallel or (one.workers == 1 and one.config == "1")
            schedule = "" if one.kind == one.schedule else f", {one_line(one.schedule)}"
            config = "" if alone else short_config(one.config) + schedule
            yield Comparison(one_line(one.kind), config, seconds, seconds / source.stated.step_s, _rival_remark(one))


def _rival_remark(rival: PlanRival) -> str:
    """The workers and microbatch of a rival, and the reason why it is not the answer."""
    size = f"{rival.workers} worker{'s' if rival.workers > 1 else ''}, microbatch {rival.minibatch}"
    oldest = max(rival.updates.stale_by, default=0)
    old = f"; gradients up to {oldest} updates old" if oldest > 1 else "; gradients 1 update old" if oldest else ""
    return size + old + ("" if rival.allowed else "; excluded by the constraints")


def _remark(baseline: PlanBaseline) -> str:
    """The remark on a baseline. `pipeplan check` does not verify it."""
    remarks = [one_line(baseline.not_taken), one_line(baseline.remark)]
    if baseline.name.startswith(BEST) and baseline.minibatch_s is not None:
        remarks.append("stated to be the best")
    return "; ".join([*filter(None, remarks), NOT_SHOWN])


def certificate_section(source: ReportSource) -> dict[str, Any]:
    """The section `certificate` of the report: `proven`, `gap`, `bound_s` and the sentences.

    The section has only facts that the check of plan.json establishes. The proof that the file itself claims is left
    out, except for a gap that is wider than the gap shown by the check.
    """
    checked, shown = source.checked, source.checked.shown
    sentences = [f"{checked.proof[:1].upper()}{checked.proof[1:]}."]
    gap = None
    if shown is not None:
        gap = max(shown.gap, source.stated.gap or 0.0)
        if gap > shown.gap + TOLERANCE:
            sentences.append(WIDER.format(percent(gap)))
        sentences += [SEARCHED_SPACE, "`pipeplan check` verifies this without the solvers."]
    elif checked.wrong is None:
        sentences.append(COVERED)
    return {
        "proven": gap is not None and gap <= TOLERANCE,
        "gap": gap,
        "bound_s": None if shown is None else shown.bound_s,
        "sentences": [*sentences, LIMITS],
    }


def short_config(config: str) -> str:
    """A configuration, or its number of stages if it is long."""
    return tables.short_config(one_line(config), MAX_CONFIG_LENGTH)
