"""Puts a report together."""

from __future__ import annotations

from typing import Any

from pipeplan import __version__
from pipeplan.report import bounds, certificate, comparisons, graph, links, memory, stages, timeline, words
from pipeplan.report.document import Report
from pipeplan.report.replayed import simulate
from pipeplan.report.source import Source
from pipeplan.text import one_line

MOST_SERVERS = 256


def build(source: Source) -> Report:
    """The report on a plan."""
    simulated = simulate(source.scenario)
    shown = timeline.timeline(simulated)
    rows = stages.stages(source)
    return Report(
        title=words.title(source),
        pipeplan=__version__,
        made=made(source),
        prediction=prediction(source) | {"bounds": bounds.bounds(source)[: bounds.MOST]},
        measured=None,
        stages=rows,
        graph=graph.graph(source),
        placement=stages.placement(source, MOST_SERVERS),
        timeline=shown,
        links=links.links(source, simulated)[: links.MOST],
        memory=memory.memory(source, simulated, shown.end_s),
        comparisons=comparisons.comparisons(source, None),
        scaling=None,
        certificate=certificate.certificate(source),
        words={},
    )


def made(source: Source) -> dict[str, Any]:
    """Where the figures come from."""
    said = source.root["profile"]
    return {
        "model": one_line(said["model"].text()),
        "minibatch": said["minibatch"].integer(minimum=1),
        "profile_kind": one_line(said["kind"].text()),
        "profile_how": one_line(said["how"].text()),
        "profile_device": one_line(source.known.profile.provenance.device_name) if source.known else "",
        "cluster": one_line(source.cluster.name),
        "cluster_described": words.cluster(source.cluster),
        "workers": source.cluster.workers,
        "busy": source.plan.busy,
        "config": source.plan.config,
        "copies": source.plan.copies,
        "schedule": source.root["plan"]["schedule"].text(),
        "accumulate": source.plan.accumulate,
        "mode": "inference" if source.plan.inference else "training",
        "pipeplan": one_line(source.root["pipeplan"].text()),
        "digest": said["digest"].text(),
    }


def prediction(source: Source) -> dict[str, Any]:
    """The pace."""
    pace = source.pace_s
    samples = source.root["profile"]["minibatch"].integer(minimum=1)
    return {
        "minibatch_s": pace,
        "minibatches_per_s": 1 / pace if pace else None,
        "samples_per_s": samples / pace if pace else None,
        "bound_by": one_line(source.root["prediction"]["bound_by"].text()),
    }
