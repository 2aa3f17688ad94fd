"""Comparison of the plan with other ways to use the cluster, and what is shown of faster plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from pipeplan.checker.claims import NOT_SHOWN
from pipeplan.drawing import tables
from pipeplan.explanation.second_best import Alternatives
from pipeplan.planning.verdict import TOLERANCE, percent
from pipeplan.report.document import Comparison
from pipeplan.report.source import ReportSource
from pipeplan.util.text import one_line
from pipeplan.util.typed import Amount, decode

BEST = "best "
"""Begins the name of a baseline that plan.json states to be the best of its kind."""
MAX_CONFIG_LENGTH = 24
"""Most characters of a configuration. A longer one is described by its number of stages."""
UNCHECKED = "The profile is not available, so nothing that plan.json states was checked."
SEARCHED_SPACE = (
    "The searched space has all pipelines whose stages follow the order of the worker numbers, each on consecutive "
    "workers, and copies of such a pipeline in all components of a level."
)
COVERED = "`pipeplan solve` writes a certificate for plans that keep whole weights, where checking it takes seconds."
WIDER = "Over all microbatch sizes and kinds of plans the answer claims less: none is more than {} faster."
LIMITS = (
    "This is about the predicted times: the profile's figures, the cluster's rates and the cost model. "
    "It says nothing about the times that a run will measure."
)


class PlanBaseline(Struct):
    """A baseline in plan.json."""

    name: str
    config: str
    remark: str
    not_taken: str = ""
    minibatch_s: Amount | None = None
    step_s: Amount | None = None
    gain: Amount | None = None

    @property
    def pace_s(self) -> float | None:
        """Its step time, in seconds per minibatch; in older plans that of the formulas."""
        return self.minibatch_s if self.step_s is None else self.step_s


class PlanUpdates(Struct, frozen=True):
    """How old the gradients of a rival are, by stage, in updates."""

    stale_by: tuple[int, ...] = ()


class PlanRival(Struct):
    """A rival in plan.json, at the same global batch as the plan."""

    kind: str
    config: str
    schedule: str
    minibatch: int
    workers: int
    samples_per_s: Amount
    data_parallel: str = ""
    allowed: bool = True
    updates: PlanUpdates = PlanUpdates()

    @property
    def remark(self) -> str:
        """Its workers and microbatch, and what keeps it from being the answer."""
        size = f"{self.workers} worker{'s' if self.workers > 1 else ''}, microbatch {self.minibatch}"
        oldest = max(self.updates.stale_by, default=0)
        old = f"; gradients up to {oldest} updates old" if oldest > 1 else "; gradients 1 update old" if oldest else ""
        return size + old + ("" if self.allowed else "; excluded by the constraints")


class PlanChoice(Struct):
    """The rivals that plan.json states."""

    rivals: tuple[PlanRival, ...]
    stale: PlanRival | None = None
    """The best plan with old gradients."""


def comparison_rows(source: ReportSource, others: Alternatives | None) -> list[Comparison]:
    """This plan, the rivals in plan.json, and the runner-up if it was searched for.

    Plans for a named schedule have baselines instead of rivals. No check verifies these, and the sentences say so.
    """
    rows = [Comparison("this plan", source.name, source.step_s, 1.0, "")]
    stated = source.root.get("choice")
    if stated is not None:
        rows += _rivals(source, decode(stated, PlanChoice))
    else:
        for one in decode(source.root["baselines"], tuple[PlanBaseline, ...]):
            name = one_line(one.name.removeprefix(BEST))
            rows.append(Comparison(name, short_config(one.config), one.pace_s, one.gain, _remark(one)))
    if others is not None and others.second is not None:
        second = others.second
        remark = "the best plan of another configuration" if others.exact else "the best other plan that was found"
        if abs(second.behind) <= TOLERANCE:
            remark = "as fast, in another configuration"
        pace_s = second.pace_s if second.step_s is None else second.step_s
        if pace_s != second.pace_s or source.step_s != source.pace_s:
            remark += ", by the formulas"
        config, gain = short_config(second.plan.config), pace_s / source.step_s
        rows.append(Comparison("runner-up", config, pace_s, gain, remark))
    return rows


def _rivals(source: ReportSource, choice: PlanChoice) -> Iterator[Comparison]:
    """All rivals but the plan itself, and the best plan with old gradients."""
    own = source.plan.config, source.plan.schedule, source.microbatch, data_parallel(source)
    for one in [*choice.rivals, *filter(None, [choice.stale])]:
        if (one.config, one.schedule, one.minibatch, one.data_parallel) != own and one.samples_per_s > 0:
            seconds = source.microbatch / one.samples_per_s
            alone = one.data_parallel or (one.workers == 1 and one.config == "1")
            schedule = "" if one.kind == one.schedule else f", {one_line(one.schedule)}"
            config = "" if alone else short_config(one.config) + schedule
            yield Comparison(one_line(one.kind), config, seconds, seconds / source.step_s, one_line(one.remark))


def data_parallel(source: ReportSource) -> str:
    """How the executor trains the plan on the whole model: `ddp`, `zero1`, `fsdp` or `hsdp`; empty for others."""
    stated = source.root.get("data_parallel")
    return "" if stated is None else one_line(stated.text())


def _remark(baseline: PlanBaseline) -> str:
    """The remark on a baseline, with what is stated and not shown."""
    remarks = [one_line(baseline.not_taken), one_line(baseline.remark)]
    if baseline.name.startswith(BEST) and baseline.minibatch_s is not None:
        remarks.append("stated to be the best")
    return "; ".join([*filter(None, remarks), NOT_SHOWN])


def certificate_section(source: ReportSource) -> dict[str, Any]:
    """The section `certificate` of the report: `proven`, `gap`, `bound_s` and the sentences.

    All of it is what the check of plan.json establishes. What the file itself says about a proof is not repeated,
    except for a gap that is wider than the shown one.
    """
    checked = source.checked
    shown = None if checked is None else checked.shown
    sentences = [UNCHECKED if checked is None else f"{checked.proof[:1].upper()}{checked.proof[1:]}."]
    gap = None
    if shown is not None:
        gap = max(shown.gap, source.root["gap"].number())
        if gap > shown.gap + TOLERANCE:
            sentences.append(WIDER.format(percent(gap)))
        sentences += [SEARCHED_SPACE, "`pipeplan check` verifies this without the solvers."]
    elif checked is None or checked.wrong is None:
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
