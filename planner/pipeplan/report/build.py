"""Builds the report on a plan from its sections."""

from __future__ import annotations

from typing import Any

from pipeplan._version import __version__
from pipeplan.explanation.second_best import Alternatives
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.report import (
    bounds,
    certificate,
    comparisons,
    labels,
    links,
    measured,
    model_graph,
    stages,
    text_alternative,
    timeline,
)
from pipeplan.report.document import Report
from pipeplan.report.source import Known, Source
from pipeplan.report.timeline import simulate
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.util.text import one_line

MOST_SERVERS = 256
"""Most servers whose workers are listed."""
MOST_CUTS = 50_000
"""Most cuts that are enumerated."""
QUICK_SECOND, QUICK_SCALING = 1_000, 5_000
"""Largest number of cuts times workers at which the runner-up, and plans for other numbers of servers, are searched for
without `--thorough`. The search then takes some tenths of a second."""


def build(source: Source, run: MeasuredRun | None = None, *, thorough: bool = False) -> Report:
    """The report on a plan, and on a run of it if there is one.

    With `thorough`, searches that may take minutes are made too.
    """
    simulated = simulate(source.scenario)
    shown = timeline.timeline(simulated, run)
    alternatives, curve = _searched(source, thorough)
    report = Report(
        title=labels.title(source),
        pipeplan=__version__,
        made=made(source),
        prediction=prediction(source) | {"bounds": bounds.bounds(source)[: bounds.MOST]},
        measured=None if run is None else measured.measured(run),
        stages=stages.stages(source),
        graph=model_graph.graph(source),
        placement=stages.placement(source, MOST_SERVERS),
        timeline=shown,
        links=links.links(source, simulated, measured.allreduces(run) if run is not None else {})[: links.MOST],
        memory=stages.memory(source, simulated, shown.end_s, measured.peaks(run) if run is not None else {}),
        comparisons=comparisons.comparisons(source, alternatives),
        scaling=curve,
        certificate=certificate.certificate(source),
        words={},
        notes=[],
    )
    return text_alternative.told(report, source, simulated, run, alternatives)


def _searched(source: Source, thorough: bool) -> tuple[Alternatives | None, dict[str, Any] | None]:
    """The runner-up and the scaling curve; None for a search that would take too long."""
    known = source.known
    if known is None:
        return None, None
    if not thorough and len(known.problem.units) * known.problem.cluster.workers > QUICK_SCALING:
        return None, None
    cuts = enumerate_cuts(known.problem, MOST_CUTS)
    alternatives = curve = None
    if thorough or _size(known, cuts) <= QUICK_SECOND:
        alternatives = comparisons.runner_up(source, known, cuts, thorough=thorough)
    if thorough or _size(known, cuts) <= QUICK_SCALING:
        curve = comparisons.scaling(known, cuts, source.plan, source.pace_s)
    return alternatives, curve


def _size(known: Known, cuts: Cuts) -> int:
    return len(cuts.ideals) * known.problem.cluster.workers


def made(source: Source) -> dict[str, Any]:
    """The origin of the figures, and the model, cluster and schedule of the plan."""
    profile = source.root["profile"]
    return {
        "model": one_line(profile["model"].text()),
        "minibatch": profile["minibatch"].integer(minimum=1),
        "profile_kind": one_line(profile["kind"].text()),
        "profile_how": one_line(profile["how"].text()),
        "profile_device": one_line(source.known.profile.provenance.device_name) if source.known else "",
        "cluster": one_line(source.cluster.name),
        "cluster_described": labels.cluster(source.cluster),
        "workers": source.cluster.workers,
        "busy": source.plan.busy,
        "config": labels.config(source.plan.config),
        "copies": source.plan.copies,
        "schedule": source.root["plan"]["schedule"].text(),
        "accumulate": source.plan.accumulate,
        "mode": "inference" if source.plan.inference else "training",
        "pipeplan": one_line(source.root["pipeplan"].text()),
        "digest": profile["digest"].text(),
    }


def prediction(source: Source) -> dict[str, Any]:
    """The predicted pace, and the resource that bounds it."""
    pace = source.pace_s
    samples = source.root["profile"]["minibatch"].integer(minimum=1)
    return {
        "minibatch_s": pace,
        "minibatches_per_s": 1 / pace if pace else None,
        "samples_per_s": samples / pace if pace else None,
        "bound_by": one_line(source.root["prediction"]["bound_by"].text()),
    }
