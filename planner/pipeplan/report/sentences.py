"""Sentences of a report: what its figures and tables do not show, by section, and notes on the whole report."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.report.document import PlanReport
from pipeplan.report.source import ReportSource
from pipeplan.report.timeline import ReportSimulation
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.util.units import show_step_time, show_time

PARTS_ADD_UP = "The parts of the time from one update to the next add up to the step time; the other resources overlap."
STATED = "All figures are for the same global batch; those of other plans are stated, not shown."
MAX_DESCRIBED = 8
"""Largest number of stages that are described separately."""
EQUAL_TIME = 0.01
"""Relative difference up to which two times count as equal."""
STALE = 1e-6
"""Relative difference above which a plan's step time disagrees with the present cost model."""
NOTABLE_SLOWDOWN, BUSY_SHARE = 0.03, 0.9
"""If a plan is slower than the formulas by more than the first share, a link busier than the second explains it."""


def section_sentences(
    report: PlanReport, source: ReportSource, simulated: ReportSimulation, run: MeasuredRun | None
) -> dict[str, list[str]]:
    """The sentences of all sections, by the section's name."""
    return {
        "summary": list(_summary(report)),
        "placement": list(_placement(report)),
        "stages": list(_stages(report)),
        "graph": [report.graph.note] if report.graph.note else [],
        "timeline": list(_timeline(report, source, simulated)),
        "memory": list(_memory(report)),
        "loads": [PARTS_ADD_UP] if any(row.part for row in report.loads) else [],
        "comparisons": [STATED] if source.stated.choice is not None else [],
        "measured": list(_run(report, run)),
    }


def _summary(report: PlanReport) -> Iterator[str]:
    """The plan in one sentence, and the source of its step time."""
    made, prediction, stages = report.made, report.prediction, len(report.stages)
    purpose = "inference" if made["mode"] == "inference" else "training"
    copies = f" in {made['copies']} copies of the pipeline" if made["copies"] > 1 else ""
    yield (
        f"{stages} stage{'s' * (stages > 1)} for {purpose} {made['model'] or 'the model'} on {made['busy']} of "
        f"{made['workers']} workers of cluster {made['cluster']} ({made['cluster_described']}){copies}, microbatch "
        f"{made['minibatch']}."
    )
    if prediction["minibatch_s"] != prediction["formulas_s"]:
        yield (
            f"The step time is simulated. By the formulas, to which all shares of loads refer, it is "
            f"{show_time(prediction['formulas_s'])}."
        )


def _placement(report: PlanReport) -> Iterator[str]:
    idle = report.made["workers"] - report.made["busy"]
    if idle:
        yield f"{idle} worker{'s are' if idle > 1 else ' is'} idle."
    if sum(len(server["workers"]) for server in report.placement) < report.made["workers"]:
        yield f"The first {len(report.placement)} servers are shown."


def _stages(report: PlanReport) -> Iterator[str]:
    if report.made["updates"]:
        yield report.made["updates"]
    recomputing = [str(stage.index + 1) for stage in report.stages if stage.recompute]
    if recomputing:
        several = len(recomputing) > MAX_DESCRIBED
        listed = f"stage{'s' * (len(recomputing) > 1)} {', '.join(recomputing)}"
        which = f"{len(recomputing)} stages" if several else listed
        yield f"To save memory, {which} run{'s' * (len(recomputing) == 1)} forward again for backward."


def _timeline(report: PlanReport, source: ReportSource, simulated: ReportSimulation) -> Iterator[str]:
    """Sentences on the fill and the steady state of the pipeline, and on the share of time spent computing."""
    shown, metrics = report.timeline, simulated.report
    yield "This is a simulation of the schedule that the executor runs, with the predicted times."
    yield "A trace for Perfetto shows the whole of a long simulation."
    if simulated.remark:
        yield simulated.remark
    if metrics.fill_s > 0:
        yield f"Every stage has begun after {show_time(metrics.fill_s)}."
    if metrics.steady is None:
        yield "The simulation is too short for a steady state."
    else:
        step_s, ratio = metrics.steady.step_time_s, metrics.ratio or 1.0
        off = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than by the formulas"
        comparison = "as by the formulas" if abs(ratio - 1) <= EQUAL_TIME else off
        since = f"From {show_time(shown.steady[0])} on it is steady, with" if shown.steady else "Steady, it has"
        yield f"{since} {show_time(step_s)} a microbatch, {comparison}."
        if source.problem.cluster.shared_cores:
            yield "Here, computing includes waiting for a core that workers share."
        for index, stage in enumerate(metrics.stages[:MAX_DESCRIBED], start=1):
            sync = f", are held up by all-reduces for {stage.synchronising:.0%}" if stage.synchronising >= 0.005 else ""
            yield f"Stage {index}: its workers compute for {stage.computing:.0%} of the time{sync}."
        full = [link for link in report.loads if (link.simulated_busy or 0.0) >= BUSY_SHARE]
        if ratio > 1 + NOTABLE_SLOWDOWN and full:
            busy = f"{full[0].name} is busy for {full[0].simulated_busy:.0%} of the time"
            yield f"Messages come in bursts, which the formulas average: {busy}."
    if shown.measured is not None:
        yield "Below it is the run's recording of the same microbatches, from the beginning of an epoch."


def _memory(report: PlanReport) -> Iterator[str]:
    if any(row.peak_bytes < row.planned_bytes * (1 - EQUAL_TIME) for row in report.memory):
        yield "The simulation needs less memory if it does not use all weight versions that the plan allows."
    if any(stage.capacity_bytes is None for stage in report.stages):
        yield "As requested, memory did not limit this plan."


def _run(report: PlanReport, run: MeasuredRun | None) -> Iterator[str]:
    """The run, compared with the prediction."""
    figures = report.measured
    if figures is None:
        yield "No run is shown: `pipeplan report PLAN RUN` compares one with the prediction."
        return
    if not figures["minibatch_s"]:
        yield "The run was too short to measure a step time."
    else:
        share = f", {1 / figures['ratio']:.0%} of the predicted throughput" if figures["ratio"] else ""
        fill = "; this includes the fill, because the epochs are short" if figures["includes_fill"] else ""
        yield (
            f"Measured over {figures['minibatches']} microbatches: "
            f"{show_step_time(figures['minibatches_per_s'])} microbatches/s{share}{fill}."
        )
    if figures["cause"]:
        yield f"First cause of the difference: {figures['cause']}."
    if run is not None and not run.timelines:
        yield "The run recorded no timeline, so none is drawn."


def report_notes(report: PlanReport, source: ReportSource) -> Iterator[str]:
    """Notes on the whole report: where the times come from, and what is missing or wrong."""
    made = report.made
    if warning := source.problem.profile.provenance.warning:
        yield f"{warning}."
    how = f" ({made['profile_how'].rstrip('.')})" if made["profile_how"] else ""
    device = made["profile_device"]
    if made["profile_kind"] == "modelled":
        yield f"The times of the layers are modelled{f' for {device}' if device else ''}, not measured{how}."
    else:
        yield f"The times of the layers are {made['profile_kind']}{f' on {device}' if device else ''}{how}."
    if abs(source.score.step_time_s / source.step_time_s - 1) > STALE:
        yield (
            f"plan.json states {show_time(source.step_time_s)} a microbatch; by the cost model of this pipeplan it is "
            f"{show_time(source.score.step_time_s)}: solve again to plan with it."
        )
    if source.checked.wrong is not None:
        yield f"`pipeplan check` finds plan.json wrong ({source.checked.wrong.what}): do not rely on what it states."
