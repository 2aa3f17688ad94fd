"""Text alternatives of a report: sentences with the figures of each section, for those who read or hear them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeplan.explanation.second_best import Alternatives
from pipeplan.planning.verdict import TOLERANCE
from pipeplan.report.bounds import MAX_BOUNDS, certificate_summary
from pipeplan.report.document import Comparison, PlanReport
from pipeplan.report.labels import capitalised, percent_text, time_text
from pipeplan.report.links import MAX_LINKS
from pipeplan.report.source import ReportSource
from pipeplan.report.timeline import ReportSimulation
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.util.units import show_pace, show_rate, show_size

MAX_DESCRIBED = 8
"""Most stages that are described one by one."""
EQUAL_TIME = 0.01
"""Relative difference up to which two times count as equal."""
EQUAL_PACE = 0.005
"""Relative difference up to which two paces count as equal."""
STALE = 1e-6
"""Relative difference above which a plan's stated pace disagrees with the present cost model."""
NOTABLE_SLOWDOWN, BUSY_SHARE = 0.03, 0.9
"""If a simulation is slower than the prediction by this share, a link that is this busy explains it."""


def with_text(
    report: PlanReport,
    source: ReportSource,
    simulated: ReportSimulation,
    run: MeasuredRun | None,
    second: Alternatives | None,
) -> PlanReport:
    """The report with the sentences of all sections, and the notes."""
    words = {
        "summary": list(_summary(report)),
        "placement": list(_placement(report)),
        "stages": list(_stages(report)),
        "graph": list(_graph(report)),
        "timeline": list(timeline_sentences(report, source, simulated)),
        "memory": list(memory_sentences(report)),
        "bounds": list(bound_sentences(report, source)),
        "links": list(link_sentences(report, source)),
        "comparisons": list(comparison_sentences(report, second)),
        "scaling": list(scaling_sentences(report)),
        "measured": list(run_sentences(report, run)),
    }
    return replace(report, words=words, notes=list(_notes(report, source, simulated)))


def _summary(report: PlanReport) -> Iterator[str]:
    made, prediction, stages = report.made, report.prediction, len(report.stages)
    purpose = "inference" if made["mode"] == "inference" else "training"
    copies = f" in {made['copies']} copies of the pipeline" if made["copies"] > 1 else ""
    yield (
        f"{stages} stage{'s' * (stages > 1)} for {purpose} {made['model'] or 'the model'} on {made['busy']} of "
        f"{made['workers']} workers of cluster {made['cluster']} ({made['cluster_described']}){copies}, minibatch "
        f"{made['minibatch']}."
    )
    if prediction["minibatches_per_s"]:
        yield (
            f"Predicted are {show_pace(prediction['minibatches_per_s'])} minibatches/s "
            f"({show_pace(prediction['samples_per_s'])} samples/s), "
            f"{time_text(prediction['minibatch_s'])} each, {_origin(prediction)}."
        )
    for row in report.comparisons[1:]:
        if row.name == "data parallelism" and row.gain is not None:
            faster = "as fast" if abs(row.gain - 1) < EQUAL_PACE else f"{row.gain:.2f} times as fast"
            apart = f" ({row.remark})" if row.remark else ""
            misfit = row.remark.startswith("does not fit")
            yield f"Data parallelism {row.remark}." if misfit else f"That is {faster} as data parallelism{apart}."
    yield certificate_summary(report.certificate)
    if report.measured is not None and report.measured["ratio"]:
        yield f"Measured is {1 / report.measured['ratio']:.0%} of the predicted pace."


def _origin(prediction: dict[str, Any]) -> str:
    """The bound of the pace by the formulas, and that it is simulated where it differs from them."""
    if prediction["minibatch_s"] == prediction["formulas_s"]:
        return f"bound by {prediction['bound_by']}"
    return (
        f"simulated; by the formulas, to which all shares of the pace refer, {time_text(prediction['formulas_s'])}, "
        f"bound by {prediction['bound_by']}"
    )


def _placement(report: PlanReport) -> Iterator[str]:
    for stage in report.stages[:MAX_DESCRIBED]:
        count = len(stage.workers)
        where = f"server{'s' * (not stage.servers.isdecimal())} {stage.servers}"
        yield f"Stage {stage.index + 1} is on {count} worker{'s' * (count > 1)} of {where}."
    if len(report.stages) > MAX_DESCRIBED:
        yield f"The other {len(report.stages) - MAX_DESCRIBED} stages follow on the next workers."
    idle = report.made["workers"] - report.made["busy"]
    if idle:
        yield f"{idle} worker{'s are' if idle > 1 else ' is'} idle."
    shown = sum(len(server["workers"]) for server in report.placement)
    if shown < report.made["workers"]:
        yield f"The first {len(report.placement)} servers are shown."


def _stages(report: PlanReport) -> Iterator[str]:
    made = report.made
    if made["updates"]:
        yield made["updates"]
    if made["learning"]:
        yield made["learning"]
    recomputing = [str(stage.index + 1) for stage in report.stages if stage.recompute]
    if recomputing:
        stages_text = (
            f"stage{'s' * (len(recomputing) > 1)} {', '.join(recomputing)}"
            if len(recomputing) <= MAX_DESCRIBED
            else f"{len(recomputing)} stages"
        )
        yield f"To save memory, {stages_text} run{'s' * (len(recomputing) == 1)} forward again for backward."


def _graph(report: PlanReport) -> Iterator[str]:
    if report.graph is None:
        yield (
            "The profile that the plan was made from is not available, so its layers cannot be drawn: name it with "
            "--profile."
        )
        return
    for stage in report.stages[:MAX_DESCRIBED]:
        span = stage.first if stage.layers == 1 else f"{stage.first} to {stage.last} ({stage.layers} layers)"
        yield f"Stage {stage.index + 1}: {span}."
    if len(report.stages) > MAX_DESCRIBED:
        yield f"{len(report.stages) - MAX_DESCRIBED} more stages follow."
    if report.graph.note:
        yield report.graph.note


def _notes(report: PlanReport, source: ReportSource, simulated: ReportSimulation) -> Iterator[str]:
    made = report.made
    if source.known is not None and (warning := source.known.problem.profile.provenance.warning):
        yield f"{warning}."
    device = f" for {made['profile_device']}" if made["profile_device"] else ""
    how = f" ({made['profile_how'].rstrip('.')})" if made["profile_how"] else ""
    if made["profile_kind"] == "modelled":
        yield f"The times of the layers are modelled{device}, not measured{how}."
    else:
        yield f"The times of the layers are {made['profile_kind']}{device.replace(' for ', ' on ')}{how}."
    if source.known is None:
        yield (
            "The profile is not available, so the layers, the network cards, other clusters and the runner-up are left "
            "out: name it with --profile."
        )
    if source.known is not None and abs(source.known.score.pace_s / source.pace_s - 1) > STALE:
        yield (
            f"plan.json states {time_text(source.pace_s)} a minibatch; by the cost model of this pipeplan it is "
            f"{time_text(source.known.score.pace_s)}: solve again to plan with it."
        )
    if source.checked is not None and source.checked.wrong is not None:
        yield f"`pipeplan check` finds plan.json wrong ({source.checked.wrong.what}): do not rely on what it states."
    if simulated.remark:
        yield simulated.remark


def timeline_sentences(report: PlanReport, source: ReportSource, simulated: ReportSimulation) -> Iterator[str]:
    """How the pipeline fills, when it is steady, and how busy its workers are from then on."""
    shown, metrics = report.timeline, simulated.measured
    yield "This is a simulation of the schedule that the executor runs, with the predicted times."
    if simulated.remark:
        yield simulated.remark
    if metrics.fill_s > 0:
        yield f"Every stage has begun after {time_text(metrics.fill_s)}."
    if metrics.steady is None:
        yield "The simulation is too short for a steady state."
    else:
        comparison = _relative_pace(metrics.steady.pace_s / metrics.predicted_s if metrics.predicted_s else 1.0)
        since = f"From {time_text(shown.steady[0])} on it is steady, with" if shown.steady else "Steady, it has"
        yield f"{since} {time_text(metrics.steady.pace_s)} a minibatch, {comparison}."
        if source.cluster.shared_cores:
            yield "Here, computing includes waiting for a core that workers share."
        for index, stage in enumerate(metrics.stages[:MAX_DESCRIBED], start=1):
            sync = f", are held up by all-reduces for {stage.synchronising:.0%}" if stage.synchronising >= 0.005 else ""
            yield f"Stage {index}: its workers compute for {stage.computing:.0%} of the time{sync}."
    if metrics.steady is not None and metrics.steady.pace_s > (1 + NOTABLE_SLOWDOWN) * metrics.predicted_s:
        full = [link for link in report.links if link.busy >= BUSY_SHARE]
        if full:
            busy = f"{full[0].name} is busy for {full[0].busy:.0%} of the time"
            yield f"Traffic comes in bursts, which the prediction averages: {busy}."
    if shown.omitted:
        yield shown.omitted
    if shown.measured is not None:
        yield "The run's recording of the same minibatches is below it, and begins with an epoch."


def _relative_pace(ratio: float) -> str:
    if abs(ratio - 1) <= EQUAL_TIME:
        return "as by the formulas"
    return f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than by the formulas"


def memory_sentences(report: PlanReport) -> Iterator[str]:
    """The memory of the fullest workers, and its parts."""
    fullest = max(report.stages, key=lambda stage: stage.memory_bytes)
    parts = ", ".join(f"{name} {show_size(size)}" for name, size in fullest.memory_parts)
    capacity = f" of {show_size(fullest.capacity_bytes)}" if fullest.capacity_bytes else ""
    share = f" ({percent_text(fullest.memory_bytes / fullest.capacity_bytes)})" if fullest.capacity_bytes else ""
    needed = f"{show_size(fullest.memory_bytes)}{capacity}{share}"
    yield f"Stage {fullest.index + 1} needs the most, {needed} on each worker: {parts}."
    if any(row.peak_bytes < row.planned_bytes * (1 - EQUAL_TIME) for row in report.memory):
        yield "The simulation needs less where it does not use every version of the weights that the plan allows for."
    if any(stage.capacity_bytes is None for stage in report.stages):
        yield "Memory did not limit this plan, by request."
    for row in report.memory[:MAX_DESCRIBED]:
        if row.measured_peak_bytes is not None:
            yield f"Stage {row.stage + 1}: the measured peak is {show_size(row.measured_peak_bytes)}."


def bound_sentences(report: PlanReport, source: ReportSource) -> Iterator[str]:
    """The slowest resource, and those that come next."""
    rows = report.prediction["bounds"]
    if not rows:
        return
    first = rows[0]
    if source.scenario.drains:
        yield "The parts of the time from one update to the next add up to the pace; the longest is:"
        yield f"{capitalised(first.what)}, {time_text(first.seconds)} a minibatch ({first.share:.0%})."
        return
    yield f"The slowest is {first.what}: {time_text(first.seconds)} a minibatch, {first.share:.0%} of the pace."
    for row in rows[1:3]:
        yield f"Next comes {row.what}, {time_text(row.seconds)} ({row.share:.0%})."
    if len(rows) == MAX_BOUNDS:
        yield f"The {MAX_BOUNDS} busiest are listed."


def link_sentences(report: PlanReport, source: ReportSource) -> Iterator[str]:
    """The busiest link, and the origin and completeness of the list."""
    if not report.links:
        yield "Nothing is sent between workers."
        return
    first = report.links[0]
    yield (
        f"The busiest is {first.name}, at {show_rate(first.rate)}: {show_size(first.bytes_per_minibatch)} a minibatch, "
        f"busy for {first.busy:.0%} of the time."
    )
    if any(not link.simulated for link in report.links):
        yield "For network cards this is the average load of all traffic; for the other links it was simulated."
    if source.known is None:
        yield "Network cards are left out, because the profile is not available."
    if len(report.links) == MAX_LINKS:
        yield f"The {MAX_LINKS} busiest are listed."


def comparison_sentences(report: PlanReport, second: Alternatives | None) -> Iterator[str]:
    """How many times faster the plan is than each alternative."""
    for row in report.comparisons[1:]:
        if row.name != "runner-up":
            yield _comparison_sentence(row)
    if second is None:
        yield "A runner-up was not searched for, because that can take long; `pipeplan report --thorough` does."
    elif second.second is None:
        yield "No plan of another configuration was found."
    else:
        behind = (report.comparisons[-1].gain or 1.0) - 1.0
        slower = "as fast" if abs(behind) <= TOLERANCE else f"{_small_share(behind)} slower"
        yield f"The runner-up, {report.comparisons[-1].config}, is {slower} ({report.comparisons[-1].remark})."


def _small_share(share: float) -> str:
    return "less than 0.1%" if share < 0.001 else f"{share:.1%}"


def _comparison_sentence(row: Comparison) -> str:
    name = f"{row.name} ({row.config})" if row.config else row.name
    if row.gain is None:
        return f"{capitalised(name)}: {row.remark or 'there is none'}."
    if row.remark.startswith("does not fit"):
        return f"{capitalised(name)} {row.remark}; it would take {time_text(row.minibatch_s or 0.0)} a minibatch."
    gain = "As fast" if abs(row.gain - 1) <= TOLERANCE else f"{row.gain:.2f} times as fast"
    article = "" if row.name.endswith("parallelism") else "the "
    return f"{gain} as {article}{name}{f': {row.remark}' if row.remark else ''}."


def scaling_sentences(report: PlanReport) -> Iterator[str]:
    """The pace on clusters of other sizes."""
    if report.scaling is None:
        yield "Plans for other sizes of the cluster were not searched for; `pipeplan report --thorough` does."
        return
    points, current = report.scaling["points"], report.scaling["here"]
    pace = points["minibatch_s"][current]
    yield (
        "Shown are the best plan that the dynamic program finds for each size of the cluster, and data parallelism, by "
        "the formulas."
    )
    for index, (workers, other_pace) in enumerate(zip(points["workers"], points["minibatch_s"], strict=True)):
        if index == current:
            continue
        count = f"{workers} worker{'s' * (workers > 1)}"
        if other_pace is None:
            yield f"On {count} no plan fits."
        else:
            times = "as fast" if abs(pace / other_pace - 1) < TOLERANCE else f"{pace / other_pace:.2f} times as fast"
            yield f"On {count} the best plan ({points['config'][index]}) is {times} as this one."


def run_sentences(report: PlanReport, run: MeasuredRun | None) -> Iterator[str]:
    """The run, compared with the prediction."""
    if report.measured is None:
        yield "No run is shown: `pipeplan report PLAN RUN` puts one beside the prediction."
        return
    figures = report.measured
    if not figures["minibatch_s"]:
        yield "The run was too short to measure a pace."
    else:
        share = f", {1 / figures['ratio']:.0%} of the prediction" if figures["ratio"] else ""
        fill = "; this includes the fill, because the epochs are short" if figures["includes_fill"] else ""
        yield (
            f"Measured over {figures['minibatches']} minibatches: "
            f"{show_pace(figures['minibatches_per_s'])} minibatches/s, "
            f"{time_text(figures['minibatch_s'])} each{share}{fill}."
        )
    if figures["cause"]:
        yield f"First cause of the difference: {figures['cause']}."
    if run is not None and not run.timelines:
        yield "The run recorded no timeline, so none is drawn."
