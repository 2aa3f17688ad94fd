"""What a report says in words, part by part: the same figures as are drawn, for those who read or hear them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.drawing.plan_table import describe_cluster
from pipeplan.explanation.second_best import Alternatives
from pipeplan.report import certificate, comparisons, text_alternative
from pipeplan.report.document import Report
from pipeplan.report.source import Source
from pipeplan.report.timeline import Simulated
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.util.text import one_line
from pipeplan.util.units import show_pace

FEW = 8
"""Stages that are told one by one."""
NEAR = 0.005
"""Relative: paces that differ by less are told as equal."""
STALE = 1e-6
"""Relative: by how much a plan's pace may differ from what the cost model says of it now."""


def title(source: Source) -> str:
    """What the plan is, in a line."""
    model = one_line(source.root["profile"]["model"].text()) or "a model"
    return f"{model} as {comparisons.config(source.plan.config)} on cluster {one_line(source.cluster.name)}"


def cluster(found: Cluster) -> str:
    """The devices of a cluster."""
    return describe_cluster(found)


def told(
    report: Report, source: Source, simulated: Simulated, run: MeasuredRun | None, second: Alternatives | None
) -> Report:
    """The report with its sentences."""
    words = {
        "summary": list(_summary(report)),
        "placement": list(_placement(report)),
        "stages": list(_stages(report)),
        "graph": list(_graph(report)),
        "timeline": list(text_alternative.timeline(report, source, simulated)),
        "memory": list(text_alternative.memory(report)),
        "bounds": list(text_alternative.bounds(report, source)),
        "links": list(text_alternative.links(report, source)),
        "comparisons": list(text_alternative.compared(report, second)),
        "scaling": list(text_alternative.scaling(report)),
        "measured": list(text_alternative.measured(report, run)),
    }
    return replace(report, words=words, notes=list(_notes(report, source, simulated)))


def _summary(report: Report) -> Iterator[str]:
    made, said, stages = report.made, report.prediction, len(report.stages)
    what = "inference" if made["mode"] == "inference" else "training"
    copies = f" in {made['copies']} copies of the pipeline" if made["copies"] > 1 else ""
    yield (
        f"{stages} stage{'s' * (stages > 1)} for {what} {made['model'] or 'the model'} on {made['busy']} of "
        f"{made['workers']} workers of cluster {made['cluster']} ({made['cluster_described']}){copies}, minibatch "
        f"{made['minibatch']}."
    )
    if said["minibatches_per_s"]:
        yield (
            f"Predicted are {show_pace(said['minibatches_per_s'])} minibatches/s "
            f"({show_pace(said['samples_per_s'])} samples/s), "
            f"{text_alternative.time(said['minibatch_s'])} each, bound by {said['bound_by']}."
        )
    for one in report.comparisons[1:]:
        if one.name == "data parallelism" and one.gain is not None:
            faster = "as fast" if abs(one.gain - 1) < NEAR else f"{one.gain:.2f} times as fast"
            yield f"Data parallelism {one.remark}." if one.remark else f"That is {faster} as data parallelism."
    yield certificate.in_short(report.certificate)
    if report.measured is not None and report.measured["ratio"]:
        yield f"Measured is {1 / report.measured['ratio']:.0%} of the predicted pace."


def _placement(report: Report) -> Iterator[str]:
    for stage in report.stages[:FEW]:
        count = len(stage.workers)
        where = f"server{'s' * (not stage.servers.isdecimal())} {stage.servers}"
        yield f"Stage {stage.index + 1} is on {count} worker{'s' * (count > 1)} of {where}."
    if len(report.stages) > FEW:
        yield f"The other {len(report.stages) - FEW} stages follow on the next workers."
    idle = report.made["workers"] - report.made["busy"]
    if idle:
        yield f"{idle} worker{'s have' if idle > 1 else ' has'} nothing to do."
    shown = sum(len(server["workers"]) for server in report.placement)
    if shown < report.made["workers"]:
        yield f"The first {len(report.placement)} servers are shown."


def _stages(report: Report) -> Iterator[str]:
    made = report.made
    update = f", {made['accumulate']} minibatches per update" if made["accumulate"] else ""
    yield f"The schedule is {made['schedule']}{update}."
    again = [str(stage.index + 1) for stage in report.stages if stage.recompute]
    if again:
        which = f"stage{'s' * (len(again) > 1)} {', '.join(again)}" if len(again) <= FEW else f"{len(again)} stages"
        yield f"To save memory, {which} run{'s' * (len(again) == 1)} forward again for backward."


def _graph(report: Report) -> Iterator[str]:
    if report.graph is None:
        yield (
            "The profile that the plan was made from is not at hand, so that its layers cannot be drawn: name it with "
            "--profile."
        )
        return
    for stage in report.stages[:FEW]:
        span = stage.first if stage.layers == 1 else f"{stage.first} to {stage.last} ({stage.layers} layers)"
        yield f"Stage {stage.index + 1}: {span}."
    if len(report.stages) > FEW:
        yield f"{len(report.stages) - FEW} more stages follow."
    if report.graph.note:
        yield report.graph.note


def _notes(report: Report, source: Source, simulated: Simulated) -> Iterator[str]:
    made = report.made
    device = f" for {made['profile_device']}" if made["profile_device"] else ""
    how = f" ({made['profile_how'].rstrip('.')})" if made["profile_how"] else ""
    if made["profile_kind"] == "modelled":
        yield f"The times of the layers are modelled{device}, not measured{how}."
    else:
        yield f"The times of the layers are {made['profile_kind']}{device.replace(' for ', ' on ')}{how}."
    if source.known is None:
        yield (
            "The profile is not at hand: what needs it, the layers, the network cards, other clusters and a second "
            "choice, is left out. Name it with --profile."
        )
    if source.known is not None and abs(source.known.score.pace_s / source.pace_s - 1) > STALE:
        yield (
            f"plan.json states {text_alternative.time(source.pace_s)} a minibatch; by the cost model of this pipeplan "
            f"it is {text_alternative.time(source.known.score.pace_s)}: solve again to plan with it."
        )
    if simulated.remark:
        yield simulated.remark
