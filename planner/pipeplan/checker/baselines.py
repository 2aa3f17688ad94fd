"""Checks the baselines in plan.json: every stated pace is that of the stages stated with it.

That no other uniform grid and no other straight pipeline is faster is not checked; no certificate speaks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeplan.checker.charged_pace import ChargedPace, charged_pace
from pipeplan.checker.description import configuration
from pipeplan.checker.document import FLUSH, PlanDocument, stages_from_json
from pipeplan.checker.figures import StageFigures, stage_figures, weight_versions
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.stated_pace import stated_pace_s
from pipeplan.checker.structure import check_grid, check_structure
from pipeplan.errors import InputError
from pipeplan.util.files import Node
from pipeplan.util.units import show_size

PARALLEL, ON_FEWER, GRID, STRAIGHT, MODEL, FASTEST = (
    "data parallelism",
    "data parallelism on fewer workers",
    "best uniform grid",
    "best straight pipeline",
    "model parallelism",
    "fastest plan",
)
BEST_FLUSH, BY_DP_ALONE = "best plan of 1f1b-flush", "found by the DP alone"
NAMES = (PARALLEL, ON_FEWER, GRID, STRAIGHT, MODEL, BEST_FLUSH, FASTEST)
SOMETIMES = (ON_FEWER, FASTEST)
"""Baselines that are stated where there is something to state."""
UNPIPELINED = "the same stages, not pipelined"
NOTHING_FITS = "no straight pipeline fits in memory"
ON_SELECTION = "among a selection of the cuts; --grid searches all"
IN_TIME = "the best that was found in time"
UNSEARCHED = (
    "there was no time left to search for it; give more with --time-limit",
    "not searched for, as Ctrl-C came before",
)
"""Remarks on any baseline that takes a search, where that was not made to its end."""
WITHOUT_PACE = {
    PARALLEL: ("an update of {accumulate} minibatches is too short",),
    GRID: (
        "not searched for, as there are many workers; --grid searches for it",
        "the search was cut short to save time; --grid completes it",
        "no uniform grid fits in memory",
        f"no uniform grid was found {ON_SELECTION}",
        *UNSEARCHED,
    ),
    BEST_FLUSH: ("no plan fits in memory", *UNSEARCHED),
    STRAIGHT: (NOTHING_FITS, *UNSEARCHED),
    MODEL: (NOTHING_FITS, *UNSEARCHED),
}
"""Remarks on a baseline without a pace. None of them is shown by a check."""

INEXACT = {GRID: ON_SELECTION, STRAIGHT: IN_TIME}
"""Remarks on a baseline with a pace that its search has not shown to be the best."""

Same = Callable[[Node, float], None]
"""Raises an `InputError` unless a stated figure equals a computed one, up to rounding."""


def check_baselines(document: PlanDocument, model: CheckedModel, same: Same) -> str | None:
    """Check the baselines, and return a summary; None where plan.json does not state their stages.

    Raises an `InputError` that names the first field that is wrong.
    """
    entries = document.root["baselines"].items()
    names = [entry["name"].text() for entry in entries]
    left_out = {GRID} if document.options.grid else set()
    left_out |= {STRAIGHT, MODEL} if document.virtual else {BEST_FLUSH}
    left_out |= {name for name in SOMETIMES if name not in names}
    expected = [name for name in NAMES if name not in left_out]
    if names != expected:
        document.root["baselines"].fail(f"expected {', '.join(expected)}")
    straight: PlanDocument | None = None
    known = True
    for entry, name in zip(entries, expected, strict=True):
        if entry.get("minibatch_s") is None:
            _check_none(entry, name, document)
            continue
        stated = straight if name == MODEL else _baseline(entry, document, model)
        own_s = _stated_s(entry, stated or document, same)
        if entry.get("gain") is not None or stated is None:
            same(entry["gain"], own_s / document.stated_s)
        if stated is None:
            known = False
            continue
        _check_kind(stated, name)
        straight = stated if name == STRAIGHT else straight
        _check_figures(entry, name, stated, model, same)
    if not known:
        return None
    return f"the paces of {len(entries)}; that the grid and the straight pipeline are the fastest is stated, not shown"


def fastest_plan(document: PlanDocument, model: CheckedModel) -> ChargedPace | None:
    """The pace of the fastest plan, in whose place the plan was taken as a simpler one; None if it was not.

    Raises an `InputError` where plan.json does not state the fastest plan, or one that does not fit in memory.
    """
    if document.root.get("simplest") is None:
        return None
    entry = document.root["baselines"].items()[-1]
    stated = _baseline(entry, document, model) if entry["name"].text() == FASTEST else None
    if stated is None:
        document.root["simplest"].fail("the last of the baselines is not the fastest plan, with its stages")
    figures = stage_figures(stated, model)
    if excess := _excess(stated, figures):
        entry.fail(f"it {excess}")
    return charged_pace(stated, model, figures)


def _baseline(entry: Node, document: PlanDocument, model: CheckedModel) -> PlanDocument | None:
    """The baseline as a plan for the same problem, or None where its stages are not stated."""
    plan = entry.get("plan")
    if plan is None:
        return None
    own = {key: document.root["plan"][key].value for key in ("inference", "schedule", "accumulate")}
    if document.virtual:  # its baselines are plans whose workers have one stage each
        own["schedule"] = FLUSH
    for key, value in own.items():
        if plan[key].value != value:
            plan[key].fail("it is not that of the plan")
    schedule = FLUSH if document.virtual else document.schedule
    stages, copies = stages_from_json(plan), plan["copies"].integer(minimum=1)
    baseline = replace(document, stages=stages, copies=copies, schedule=schedule)
    check_structure(baseline, model)
    for index, stage in enumerate(baseline.stages):
        if stage.versions != (needed := weight_versions(baseline, index)):
            plan.fail(f"stage {index + 1} keeps {needed} versions of its weights, not {stage.versions}")
    return baseline


def _stated_s(entry: Node, baseline: PlanDocument, same: Same) -> float:
    """The stated pace of a baseline, in seconds per minibatch; in plans from before it was stated, the formulas'."""
    formulas_s, stated, simulated = entry["minibatch_s"].number(), entry.get("stated_s"), entry.get("simulated_s")
    if stated is None and baseline.root.get("stated") is None:
        return formulas_s
    found = stated_pace_s(formulas_s, None if simulated is None else simulated.number(), baseline)
    same(entry["stated_s"], found)
    return found


def _check_kind(baseline: PlanDocument, name: str) -> None:
    """Raise an `InputError` unless a baseline is what its name says."""
    stages, everyone = baseline.stages, tuple(range(baseline.cluster.workers))
    if baseline.copies > 1 and name not in (FASTEST, BEST_FLUSH):
        raise InputError(f"baselines: {name} has copies of a pipeline")
    if name == PARALLEL and (len(stages) > 1 or stages[0].workers != everyone):
        raise InputError(f"baselines: {name} is not one stage on all workers")
    if name == ON_FEWER and len(stages) > 1:
        raise InputError(f"baselines: {name} is not one stage")
    if name == GRID:
        check_grid(baseline)
    if name == STRAIGHT and any(len(stage.workers) > 1 for stage in stages):
        raise InputError(f"baselines: {name} has a stage with several replicas")


def _check_figures(entry: Node, name: str, baseline: PlanDocument, model: CheckedModel, same: Same) -> None:
    """Check the pace, the configuration and the remark of a baseline."""
    figures, stages = stage_figures(baseline, model), baseline.stages
    if name == MODEL:
        same(entry["minibatch_s"], _unpipelined_s(baseline, figures))
    else:
        same(entry["minibatch_s"], charged_pace(baseline, model, figures).pace_s)
    excess = _excess(baseline, figures)
    if excess and name != PARALLEL:
        entry.fail(f"it {excess}")
    if (entry.get("gain") is None) is not bool(excess):
        entry.fail("a baseline has a gain where it fits in memory, and only there")
    shape = f"{len(stages)}×{len(stages[0].workers)}"
    found = {"config": shape if name == GRID else configuration(stages, baseline.copies), "remark": excess}
    if name == MODEL:
        found["remark"] = UNPIPELINED
    if name == ON_FEWER:
        found["remark"] = f"{len(stages[0].workers)} of {baseline.cluster.workers} workers"
    if name == BEST_FLUSH:
        found["remark"] = BY_DP_ALONE
    if entry["remark"].text() == INEXACT.get(name):
        found["remark"] = INEXACT[name]
    for key, text in found.items():
        if entry[key].text() != text:
            entry[key].fail(f"stated {entry[key].value!r}, found {text!r}")


def _check_none(entry: Node, name: str, document: PlanDocument) -> None:
    """Check that a baseline without a pace claims nothing but a known reason."""
    reasons = [reason.format(accumulate=document.accumulate) for reason in WITHOUT_PACE[name]]
    if entry.get("gain") is not None or entry["remark"].text() not in reasons:
        entry.fail("without a pace there is no gain, and the remark is one of pipeplan's reasons")
    if name != PARALLEL and entry["config"].text():
        entry["config"].fail("there is no configuration without a pace")
    if name == PARALLEL and entry["config"].text() != str(document.cluster.workers):
        entry["config"].fail(f"stated {entry['config'].value!r}, found '{document.cluster.workers}'")


def _excess(baseline: PlanDocument, figures: Sequence[StageFigures]) -> str:
    """By how much the stage with the greatest excess does not fit in memory, in words; empty where all fit."""
    if not baseline.options.memory:
        return ""
    worst, text = 0.0, ""
    for number, (stage, figure) in enumerate(zip(baseline.stages, figures, strict=True), start=1):
        excess = figure.memory_bytes - min(baseline.cluster.device_of(one).memory_bytes for one in stage.workers)
        if excess > worst:
            needs, over = show_size(figure.memory_bytes), show_size(excess)
            worst, text = (
                excess,
                f"does not fit in memory: stage {number} needs {needs}, {over} more than the device has",
            )
    return text


def _unpipelined_s(baseline: PlanDocument, figures: Sequence[StageFigures]) -> float:
    """Time of a minibatch that is alone in the pipeline: all passes, and all transfers of anything, in turn."""
    total = sum(figure.pass_s for figure in figures)
    for index, figure in enumerate(figures[:-1]):
        hop = baseline.network.among([*baseline.stages[index].workers, *baseline.stages[index + 1].workers])
        sizes = (figure.sent, figure.received_gradient)
        total += sum(size / hop.message + hop.latency_s for size in sizes if size)
    return total
