"""The bounds of the pace: every resource with the time that it spends on a minibatch, and the proof in words."""

from __future__ import annotations

from typing import Any

from pipeplan.explanation import time_breakdown
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.planning.verdict import TOLERANCE
from pipeplan.report import labels
from pipeplan.report.document import ResourceBound
from pipeplan.report.source import ReportSource
from pipeplan.util.text import one_line

FILL_AND_DRAIN = "filling and draining the pipeline"
"""A name in `bound_by` that stands for two parts of a batch: the first minibatch's passes, and its transfers."""
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
    batch = source.root["prediction"].get("batch")
    if batch is not None:
        minibatches = batch["minibatches"].integer(minimum=1) * source.plan.copies
        parts = {
            f"{batch['bound'].text()}, minibatches 2 to {batch['minibatches'].integer()}": "steady_s",
            "the first minibatch's passes: filling and draining": "work_s",
            "its transfers": "transfers_s",
            "gradient synchronisation that is waited for": "exposed_s",
            "synchronisation among the copies of the pipeline": "copies_s",
        }
        return [time_breakdown.ResourceLoad(name, batch[key].number() / minibatches) for name, key in parts.items()]
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
    """The section `certificate` of the report: `proven`, `gap`, `bound_s` and the sentences."""
    root = source.root
    gap_node, bound = root.get("gap"), root.get("bound_s")
    gap = gap_node.number() if gap_node else None
    proven = root["verdict"]["proven"].boolean() and (gap or 0.0) <= TOLERANCE
    sentences = [f"{labels.capitalised(one_line(root['verdict']['text'].text()))}."]
    if bound is not None:
        sentences.append(_bound_sentence(source, bound.number(), gap))
    sentences.append(_coverage_sentence())
    sentences.append(_document_sentence(source))
    return {"proven": proven, "gap": gap, "bound_s": bound.number() if bound else None, "sentences": sentences}


def certificate_summary(section: dict[str, Any]) -> str:
    """The section in one sentence."""
    if section["proven"]:
        return "It is proven to be the fastest plan in the space that was searched, for these predicted times."
    if section["gap"] is not None and section["gap"] > TOLERANCE:
        return f"It is not proven to be the fastest: at most {section['gap']:.2%} could be gained."
    return "It is the fastest plan by one solver, and no second solver confirmed that."


def _bound_sentence(source: ReportSource, bound_s: float, gap: float | None) -> str:
    least = f"No plan in the space that was searched is faster than {labels.time_text(bound_s)} a minibatch"
    if gap is not None and gap <= TOLERANCE:
        return f"{least}, which is this plan's pace."
    return (
        f"{least}; this plan takes {labels.time_text(source.pace_s)}, so that at most {gap or 0:.2%} could be gained."
    )


def _coverage_sentence() -> str:
    return (
        "The proof is about the predicted times: the profile's figures, the cluster's rates and the cost model. "
        "It says nothing about the times that a run will measure."
    )


def _document_sentence(source: ReportSource) -> str:
    note = source.root.get("certificate_note")
    if source.root.get("certificate") is not None:
        return "plan.json holds a certificate, which `pipeplan check` verifies without the solvers."
    return one_line(
        f"plan.json holds no certificate: {note.text()}." if note and note.text() else "plan.json holds no certificate."
    )
