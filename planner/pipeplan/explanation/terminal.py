"""Prints `pipeplan explain` within 80 columns: the explanation of a plan, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.drawing.tables import describe_cluster, short_config, stage_table
from pipeplan.explanation.explain import Explanation
from pipeplan.explanation.sensitivity import ChangeEffect, Robustness
from pipeplan.explanation.time_breakdown import TimeBreakdown
from pipeplan.planning.baselines import UNIFORM_GRID
from pipeplan.problem.diagnosis import Diagnosis
from pipeplan.problem.problem import Problem
from pipeplan.util.text import number_ranges, one_line
from pipeplan.util.units import show_size, show_time

MOST_LOADS, MOST_LAYERS = 6, 8
LONGEST_CONFIG = 19
MATTERS = 1e-3
"""Smallest relative gain that counts."""


def explanation_parts(explanation: Explanation) -> Iterator[RenderableType]:
    """An explanation as lines and tables, each to be printed on a new line."""
    problem, score = explanation.problem, explanation.evaluation
    purpose = "inference" if explanation.plan.inference else "training"
    yield Text.assemble(
        (f"Plan {short_config(explanation.plan.config, 40)}", "bold"),
        f" for {purpose} {one_line(problem.profile.model_name)}, minibatch {problem.profile.minibatch}, on cluster "
        f"{one_line(problem.cluster.name)} ({describe_cluster(problem.cluster)}): "
        f"{show_time(explanation.step_s)} a minibatch",
    )
    if explanation.step_s != score.step_time_s:
        formula = show_time(score.step_time_s)
        yield f"This time is simulated. By the formulas, to which the shares below refer, it is {formula}."
    if explanation.behind_best:
        found = f"the best plan that was found, {explanation.best.plan.config}"
        yield Text(f"By the formulas it is {explanation.behind_best:.1%} slower than {found}.", "yellow")
    yield f"Proof: {one_line(explanation.proof)}."
    yield from _heading("Stages, and the servers that hold them")
    yield stage_table(explanation.plan, score, problem)
    yield from _heading(f"What limits the step time: {score.bound}")
    yield _loads(explanation)
    yield from _heading("Where the time goes")
    # A fourth column would be too wide for most terminals.
    yield _anatomies(tuple(anatomy for anatomy in explanation.anatomies if anatomy.name != UNIFORM_GRID))
    yield from baseline_reasons(explanation.anatomies, problem.capacity)
    yield from _heading("Second choice")
    yield from _alternatives(explanation)
    yield from _heading("What would help, by the formulas")
    yield _effects(explanation.effects)
    yield from _heading("How firmly it stands")
    yield _robustness(explanation.robustness)


def _heading(text: str) -> tuple[str, Text]:
    return "", Text(text, "bold")


def _table(*headings: str) -> Table:
    """A table whose first column has text and whose other columns have figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=bool(number))
    return table


def _loads(explanation: Explanation) -> Table:
    table = _table("resource", "a minibatch", "of the step")
    for load in explanation.loads[:MOST_LOADS]:
        share = load.seconds / explanation.evaluation.step_time_s
        table.add_row(Text(load.name), show_time(load.seconds), f"{share:.0%}")
    return table


def _anatomies(anatomies: tuple[TimeBreakdown, ...]) -> Table:
    table = _table("", *(anatomy.name for anatomy in anatomies))
    rows = [
        ("configuration", [short_config(anatomy.config, LONGEST_CONFIG) for anatomy in anatomies]),
        ("time of a minibatch", [show_time(anatomy.step_s) for anatomy in anatomies]),
        ("workers in use", [str(anatomy.busy) for anatomy in anatomies]),
        ("time spent computing", [f"{anatomy.computing:.0%}" for anatomy in anatomies]),
        ("lost to communication", [f"{anatomy.communication:.0%}" for anatomy in anatomies]),
        ("lost to idling", [f"{anatomy.idle:.0%}" for anatomy in anatomies]),
        ("sent for one sample", [show_size(anatomy.sent_bytes) for anatomy in anatomies]),
        ("  of it for gradients", [show_size(anatomy.allreduce_bytes) for anatomy in anatomies]),
        ("memory of a worker", [show_size(anatomy.memory_bytes) for anatomy in anatomies]),
    ]
    for name, cells in rows:
        table.add_row(name, *(Text(cell) for cell in cells))
    return table


def baseline_reasons(anatomies: tuple[TimeBreakdown, ...], capacity: float) -> list[str]:
    """A sentence for each baseline that says why it is slower than the plan."""
    plan, lines = anatomies[0], []
    for baseline in anatomies[1:]:
        if baseline.config == plan.config:
            lines.append(f"This plan is {_named(baseline.name)}.")
            continue
        times = baseline.step_s / plan.step_s
        speed = f"{times:.2f} times as slow" if times > 1 + MATTERS else "as fast" if times > 1 - MATTERS else "faster"
        speed += f" ({baseline.not_taken})" if baseline.not_taken else ""
        cause, share = max(
            ("communication", baseline.communication), ("idling", baseline.idle), key=lambda entry: entry[1]
        )
        line = f"{_named(baseline.name).capitalize()} is {speed}: {share:.0%} of its time is lost to {cause}"
        if cause == "communication" and plan.sent_bytes > 0:
            line += f", it sends {baseline.sent_bytes / plan.sent_bytes:.2g} times the bytes"
        if not baseline.fits:
            line += f", and it does not fit ({show_size(baseline.memory_bytes)} of {show_size(capacity)})"
        lines.append(f"{line}. Bound by {baseline.bound}.")
    return lines


def _named(name: str) -> str:
    return name if name == "data parallelism" else f"the {name}"


def _alternatives(explanation: Explanation) -> Iterator[RenderableType]:
    alternatives = explanation.alternatives
    if alternatives.second is None:
        yield "The searched plans have no other configuration."
    else:
        table = _table("configuration", "a minibatch", "behind", "searched among")
        for alternative in alternatives.found:
            step_s = alternative.step_time_s if alternative.step_s is None else alternative.step_s
            behind = step_s / explanation.step_s - 1
            table.add_row(
                Text(short_config(alternative.plan.config, LONGEST_CONFIG)),
                show_time(step_s),
                f"{behind:+.1%}" if abs(behind) > MATTERS else "0%",
                Text(alternative.part),
            )
        yield table
    if alternatives.exact:
        yield "By the formulas no other configuration of the searched space is better than the first of these."
    else:
        yield f"Searched: {'; '.join(merged_parts(alternatives.searched))}. {_left_out(explanation)}"


def _left_out(explanation: Explanation) -> str:
    """A sentence on the plans that no searched part contains."""
    plan, searched = explanation.plan, explanation.alternatives.searched
    stages, largest = len(plan.stages), max(stage.replicas for stage in plan.stages) // plan.copies
    several = f"{stages} stages" if stages > 1 else "1 stage"
    line = f"Left out: plans of {several} on {plan.busy} workers or more with a stage on {largest} or more"
    most = min(len(explanation.problem.units), explanation.problem.cluster.workers)
    tried = max((int(part.split()[0]) for part in searched if _of_stages(part)), default=stages)
    if explanation.problem.options.stages is None and tried < most:
        line += f"; plans of more than {max(tried, stages)} stages"
    return line + "."


def _of_stages(part: str) -> bool:
    """Whether a part consists of all plans with a given number of stages."""
    return part.split()[0].isdigit() and part.endswith((" stage", " stages"))


def merged_parts(parts: tuple[str, ...]) -> list[str]:
    """The names of parts, with numbers of stages merged, such as `2-5 stages`."""
    counts = [int(part.split()[0]) for part in parts if _of_stages(part)]
    stages = [f"{number_ranges(counts)} stage{'s' * (counts != [1])}"] if counts else []
    return stages + [part for part in parts if not _of_stages(part)]


def _effects(effects: tuple[ChangeEffect, ...]) -> Table:
    table = _table("change", "a minibatch", "gain", "best plan")
    for effect in effects:
        if effect.step_time_s is None or effect.gain is None:
            table.add_row(effect.name, "-", "-", Text(one_line(effect.remark)))
            continue
        helps = effect.gain > 1 + MATTERS
        gain = Text(f"{effect.gain:.2f}x" if helps else "none", "bold" if helps else "dim")
        table.add_row(
            effect.name, show_time(effect.step_time_s), gain, Text(short_config(effect.config, LONGEST_CONFIG))
        )
    return table


def _robustness(robustness: Robustness | None) -> str:
    if robustness is None:
        return (
            "The profile's times have no spread, so robustness is unknown. Measure it on your machine, or assume a "
            "spread with --spread 5%."
        )
    count = len(robustness.samples)
    if not count:
        return "For none of the drawn times did any plan fit in memory."
    how = "as measured" if robustness.assumed is None else f"{robustness.assumed * 100:.3g}% of each time, assumed"
    rivals = ", ".join(f"{short_config(config, LONGEST_CONFIG)} ({times}x)" for config, times in robustness.rivals[:3])
    return (
        f"With all times drawn again {count} times within their spread ({how}; seed {robustness.seed}), this very plan "
        f"stays the best {robustness.stays_best} times, and its configuration {robustness.same_config} times"
        + (f" (else {rivals})" if rivals else "")
        + f". It is {robustness.median:.1%} behind the best in the median drawing, {robustness.worst:.1%} in the worst."
    )


def diagnosis_parts(problem: Problem, diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Lines and a table on what does not fit, and on the changes that would make room for a plan."""
    profile, cluster = problem.profile, problem.cluster
    yield Text.assemble(
        ("No plan", "bold"),
        f" for {one_line(profile.model_name)}, minibatch {profile.minibatch}, on cluster "
        f"{one_line(cluster.name)} ({describe_cluster(cluster)})",
    )
    if diagnosis.oversized:
        yield _oversized(diagnosis)
        left = len(diagnosis.oversized) - MOST_LAYERS
        if left > 0:
            yield f"and {left} more layers"
    enough = diagnosis.enough
    if enough is not None:
        yield (
            f"Least device memory that suffices: {show_size(enough.memory_bytes)} instead of "
            f"{show_size(enough.now_bytes)}{'' if diagnosis.uniform else ' (the smallest; others alike)'}; "
            f"stage {enough.stage} of {enough.plan.config} then needs all of it."
        )
    if diagnosis.growth is not None:
        growth = diagnosis.growth
        yield f"Fewest {growth.unit}s that would do: {growth.count} instead of {growth.now}."
    elif not diagnosis.oversized and not diagnosis.unfinished:
        yield "More workers alone are not enough, for all numbers of workers that were tried."
    for flag in diagnosis.relaxed:
        yield f"Without {flag} there is a plan."
    if diagnosis.unfinished:
        yield "There was no time to try everything that might help."


def _oversized(diagnosis: Diagnosis) -> Table:
    table = _table("too large for any device", "needs", f"of {show_size(diagnosis.capacity_bytes)}, missing")
    for group in diagnosis.oversized[:MOST_LAYERS]:
        name = (
            group.name if len(group.layers) == 1 else f"{group.name} and {len(group.layers) - 1} that must be with it"
        )
        table.add_row(Text(one_line(name)), show_size(group.needs_bytes), show_size(group.missing_bytes))
    return table
