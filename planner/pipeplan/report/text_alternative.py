"""The sentences on what a report draws: time, memory, bounds, links, other plans and a run."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.explanation.second_best import Alternatives
from pipeplan.planning.verdict import TOLERANCE
from pipeplan.report import bounds as listed
from pipeplan.report import links as carried
from pipeplan.report.document import Comparison, Report
from pipeplan.report.source import Source
from pipeplan.report.timeline import Simulated
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.util.units import show_pace, show_rate, show_size, show_time

FEW = 8
NEAR = 0.01
SLOWED, FULL = 0.03, 0.9
"""A simulation so much slower than the prediction is explained, by a link that is so busy."""


def timeline(report: Report, source: Source, simulated: Simulated) -> Iterator[str]:
    """How the pipeline fills, when it is steady, and how busy its workers then are."""
    shown, seen = report.timeline, simulated.measured
    yield "This is a simulation of the schedule that the executor runs, with the predicted times."
    if simulated.remark:
        yield simulated.remark
    if seen.fill_s > 0:
        yield f"Every stage has begun after {time(seen.fill_s)}."
    if seen.steady is None:
        yield "It is too short for a steady state."
    else:
        beside = _beside(seen.steady.pace_s / seen.predicted_s if seen.predicted_s else 1.0)
        since = f"From {time(shown.steady[0])} on it is steady, with" if shown.steady else "Steady, it has"
        yield f"{since} {time(seen.steady.pace_s)} a minibatch, {beside}."
        if source.cluster.shared_cores:
            yield "To compute is here also to wait for a core that workers share."
        for index, stage in enumerate(seen.stages[:FEW], start=1):
            sync = f", are held up by all-reduces for {stage.synchronising:.0%}" if stage.synchronising >= 0.005 else ""
            yield f"Stage {index}: its workers compute for {stage.computing:.0%} of the time{sync}."
    if seen.steady is not None and seen.steady.pace_s > (1 + SLOWED) * seen.predicted_s:
        full = [one for one in report.links if one.busy >= FULL]
        if full:
            busy = f"{full[0].name} is busy for {full[0].busy:.0%} of the time"
            yield f"Traffic comes in bursts, which the prediction averages: {busy}."
    if shown.omitted:
        yield shown.omitted
    if shown.measured is not None:
        yield "Below it is what the run recorded of the same minibatches; its zero is when an epoch began."


def _beside(ratio: float) -> str:
    if abs(ratio - 1) <= NEAR:
        return "as predicted"
    return f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than predicted"


def memory(report: Report) -> Iterator[str]:
    """What the fullest workers need, and of what."""
    fullest = max(report.stages, key=lambda stage: stage.memory_bytes)
    parts = ", ".join(f"{name} {show_size(size)}" for name, size in fullest.memory_parts)
    room = f" of {show_size(fullest.capacity_bytes)}" if fullest.capacity_bytes else ""
    share = f" ({percent(fullest.memory_bytes / fullest.capacity_bytes)})" if fullest.capacity_bytes else ""
    needed = f"{show_size(fullest.memory_bytes)}{room}{share}"
    yield f"Stage {fullest.index + 1} needs the most, {needed} on each worker: {parts}."
    if any(one.peak_bytes < one.planned_bytes * (1 - NEAR) for one in report.memory):
        yield "In the simulation less is needed, where a version of the weights that the plan reckons with is not."
    if any(stage.capacity_bytes is None for stage in report.stages):
        yield "Memory was not to limit this plan."
    for one in report.memory[:FEW]:
        if one.measured_peak_bytes is not None:
            yield f"Stage {one.stage + 1}: measured is a peak of {show_size(one.measured_peak_bytes)}."


def bounds(report: Report, source: Source) -> Iterator[str]:
    """What is slowest, and what would be next."""
    found = report.prediction["bounds"]
    if not found:
        return
    first = found[0]
    if source.scenario.drains:
        yield "The parts of the time from one update to the next add up to the pace; the longest is:"
        yield f"{_capital(first.what)}, {time(first.seconds)} a minibatch ({first.share:.0%})."
        return
    yield f"The slowest is {first.what}: {time(first.seconds)} a minibatch, {first.share:.0%} of the pace."
    for one in found[1:3]:
        yield f"Then comes {one.what}, {time(one.seconds)} ({one.share:.0%})."
    if len(found) == listed.MOST:
        yield f"The {listed.MOST} busiest are listed."


def links(report: Report, source: Source) -> Iterator[str]:
    """The busiest link, and what the list has."""
    if not report.links:
        yield "Nothing is sent between workers."
        return
    first = report.links[0]
    yield (
        f"The busiest is {first.name}, at {show_rate(first.rate)}: {show_size(first.bytes_per_minibatch)} a minibatch, "
        f"busy for {first.busy:.0%} of the time."
    )
    if any(not one.simulated for one in report.links):
        yield "Of network cards it is the average load of all that crosses them; of the others what was simulated."
    if source.known is None:
        yield "Network cards are left out, as the profile is not at hand."
    if len(report.links) == carried.MOST:
        yield f"The {carried.MOST} busiest are listed."


def compared(report: Report, second: Alternatives | None) -> Iterator[str]:
    """How many times faster the plan is than each."""
    for one in report.comparisons[1:]:
        if one.name == "runner-up":
            continue
        yield _beside_plan(one)
    if second is None:
        yield "A runner-up was not sought, as that can take long; with `pipeplan report --thorough` it is."
    elif second.second is None:
        yield "No plan of another configuration was found."
    else:
        behind = second.second.behind
        slower = (
            "as fast"
            if abs(behind) <= TOLERANCE
            else f"{'less than 0.1%' if behind < 0.001 else f'{behind:.1%}'} slower"
        )
        yield f"The runner-up, {report.comparisons[-1].config}, is {slower} ({report.comparisons[-1].remark})."


def _little(share: float) -> str:
    return "less than 0.1%" if share < 0.001 else f"{share:.1%}"


def _beside_plan(one: Comparison) -> str:
    name = f"{one.name} ({one.config})" if one.config else one.name
    if one.gain is None:
        return f"{_capital(name)}: {one.remark or 'there is none'}."
    if one.remark.startswith("does not fit"):
        return f"{_capital(name)} {one.remark}; it would take {time(one.minibatch_s or 0.0)} a minibatch."
    gain = "As fast" if abs(one.gain - 1) <= TOLERANCE else f"{one.gain:.2f} times as fast"
    return f"{gain} as {name}{f': {one.remark}' if one.remark else ''}."


def scaling(report: Report) -> Iterator[str]:
    """What another size of the cluster would give."""
    if report.scaling is None:
        yield "Plans for other sizes of the cluster were not sought; with `pipeplan report --thorough` they are."
        return
    points, here = report.scaling["points"], report.scaling["here"]
    pace = points["minibatch_s"][here]
    yield "Shown are the best plan that the dynamic program finds for each size of the cluster, and data parallelism."
    for at, (workers, other) in enumerate(zip(points["workers"], points["minibatch_s"], strict=True)):
        if at == here:
            continue
        what = f"{workers} worker{'s' * (workers > 1)}"
        if other is None:
            yield f"On {what} no plan fits."
        else:
            times = "as fast" if abs(pace / other - 1) < TOLERANCE else f"{pace / other:.2f} times as fast"
            yield f"On {what} the best plan ({points['config'][at]}) is {times} as this one."


def measured(report: Report, run: MeasuredRun | None) -> Iterator[str]:
    """How the run compares."""
    if report.measured is None:
        yield "No run is shown: `pipeplan report PLAN RUN` puts one beside the prediction."
        return
    seen = report.measured
    if not seen["minibatch_s"]:
        yield "The run was too short to measure a pace."
    else:
        share = f", {1 / seen['ratio']:.0%} of the prediction" if seen["ratio"] else ""
        fill = "; the fill is in it, as the epochs are short" if seen["includes_fill"] else ""
        yield (
            f"Measured over {seen['minibatches']} minibatches: {show_pace(seen['minibatches_per_s'])} minibatches/s, "
            f"{time(seen['minibatch_s'])} each{share}{fill}."
        )
    if seen["cause"]:
        yield f"First cause of the difference: {seen['cause']}."
    if run is not None and not run.timelines:
        yield "The run recorded no timeline, so that none is drawn."


def time(seconds: float) -> str:
    """Seconds from one on, else milliseconds or microseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else show_time(seconds)


def percent(share: float) -> str:
    """A share; what is not nothing does not look like it."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
