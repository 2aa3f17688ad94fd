"""The bounds of the pace: every resource with the time that it spends on a minibatch, and the proof in words."""

from __future__ import annotations

from typing import Any

from pipeplan.checker.verdict_words import percent
from pipeplan.cost.flush import BatchTime
from pipeplan.explanation import time_breakdown
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.report import labels
from pipeplan.report.document import ResourceBound
from pipeplan.report.source import ReportSource
from pipeplan.util.typed import decode

FILL_AND_DRAIN = "filling and draining the pipeline"
"""A name in `bound_by` that stands for two parts of a batch: the first minibatch's passes, and its transfers."""
UNCHECKED = "the profile is not available, so nothing that plan.json states was checked"
SEARCHED_SPACE = (
    "The searched space has all pipelines whose stages follow the order of the worker numbers, each on consecutive "
    "workers, and copies of such a pipeline in all components of a level."
)
COVERED = (
    "`pipeplan solve` writes a certificate for asynchronous schedules and for inference, on equal servers, where "
    "checking it takes seconds."
)
MAX_BOUNDS = 40
"""Most resources that are listed, the busiest first."""


def bound_rows(source: ReportSource) -> list[ResourceBound]:
    """All resources, busiest first. For a schedule with a flush, the parts of a batch, which add up to the pace."""
    bound = source.root["prediction"]["bound_by"].text()
    if source.known is not None:
        loads = time_breakdown.resource_loads(source.plan, source.known.problem, source.known.score)
    else:
        stated = [load for load in _stated_loads(source, bound) if load.seconds > 0]
        loads = sorted(stated, key=lambda load: (-load.seconds, load.name != bound))
    pace_s = source.pace_s or 1.0
    return [ResourceBound(load.name, load.seconds, load.seconds / pace_s, _binds(load.name, bound)) for load in loads]


def _binds(name: str, bound: str) -> bool:
    """Whether a resource, or a part of a batch, is the bound that plan.json names."""
    if bound == FILL_AND_DRAIN:
        return name.endswith(": filling and draining") or name == "its transfers"
    return name == bound or (name.startswith(f"{bound}, minibatches ") or name == f"{bound} that is waited for")


def _stated_loads(source: ReportSource, bound: str) -> list[time_breakdown.ResourceLoad]:
    """The loads that plan.json alone states: passes, all-reduces, messages, and the resource that it names as bound."""
    stated = source.root["prediction"].get("batch")
    if stated is not None:
        batch = decode(stated, BatchTime)
        minibatches = batch.minibatches * source.plan.copies
        parts = {
            f"{batch.bound}, minibatches 2 to {batch.minibatches}": batch.steady_s,
            "the first minibatch's passes: filling and draining": batch.work_s,
            "its transfers": batch.transfers_s,
            "gradient synchronisation that is waited for": batch.exposed_s,
        }
        return [time_breakdown.ResourceLoad(name, seconds / minibatches) for name, seconds in parts.items()]
    loads = []
    copies_sync_s = source.root["prediction"]["copies_synchronisation_s"].number()
    if source.plan.copies > 1:
        loads.append(time_breakdown.ResourceLoad("synchronisation among the copies of the pipeline", copies_sync_s))
    for number, load in enumerate(source.scenario.stages, start=1):
        group = (source.plan.accumulate or 1) if source.plan.schedule in ACCUMULATING else load.replicas
        work = (load.forward_s + load.backward_s) / load.replicas
        loads.append(time_breakdown.ResourceLoad(f"compute of stage {number}", work))
        loads.append(time_breakdown.ResourceLoad(f"gradient synchronisation of stage {number}", load.sync_s / group))
        if number <= len(source.scenario.hops):
            hops = source.scenario.hops[number - 1]
            busy = max(max(hop.transmit_s, hop.back_s) / hop.links for hop in hops) / len(hops)
            loads.append(time_breakdown.ResourceLoad(f"traffic from stage {number} to stage {number + 1}", busy))
    if all(load.name != bound for load in loads):
        # The bound is a wait, a card or a depth. plan.json states no time for it, but since it binds that is the pace.
        loads.append(time_breakdown.ResourceLoad(bound, source.pace_s))
    return loads


def certificate_section(source: ReportSource) -> dict[str, Any]:
    """The section `certificate` of the report: `proven`, `gap`, `bound_s` and the sentences.

    All of it is what the check of plan.json establishes. What the file itself says about a proof is not repeated.
    """
    checked = source.checked
    shown = None if checked is None else checked.shown
    sentences = [f"{labels.capitalised(UNCHECKED if checked is None else checked.proof)}."]
    if shown is not None:
        sentences.append(SEARCHED_SPACE)
        sentences.append("`pipeplan check` verifies this without the solvers.")
    elif checked is None or checked.wrong is None:
        sentences.append(COVERED)
    sentences.append(_coverage_sentence())
    return {
        "proven": shown is not None and shown.optimal,
        "gap": None if shown is None else shown.gap,
        "bound_s": None if shown is None else shown.bound_s,
        "sentences": sentences,
    }


def certificate_summary(section: dict[str, Any]) -> str:
    """The section in one sentence."""
    if section["proven"]:
        return "It is shown to be the fastest plan of the searched space, for these predicted times."
    if section["gap"] is not None:
        return (
            "It is not shown to be the fastest: "
            f"no plan of the searched space is more than {percent(section['gap'])} faster."
        )
    return "It is not shown whether another plan of the searched space is faster."


def _coverage_sentence() -> str:
    return (
        "This is about the predicted times: the profile's figures, the cluster's rates and the cost model. "
        "It says nothing about the times that a run will measure."
    )
