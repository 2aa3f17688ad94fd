"""The answer of `solve` as a person reads it: a table of the stages, the gains, the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.baselines import Baseline
from pipeplan.cluster_data import Cluster
from pipeplan.evaluate import AWAITED
from pipeplan.plan import STASHING, Plan
from pipeplan.text import one_line
from pipeplan.units import show_pace, show_size, show_time
from pipeplan.verdict import TOLERANCE

if TYPE_CHECKING:  # those who only want a cluster described need not wait for the solvers
    from pipeplan.solving import Outcome


def show(outcome: Outcome, console: Console) -> None:
    """Print an outcome."""
    plan, score = outcome.plan, outcome.evaluation
    cluster, profile = outcome.problem.cluster, outcome.problem.profile
    what = "inference" if plan.inference else f"training{_schedule(plan)}"
    console.print(
        Text.assemble(
            (f"Plan {plan.config}", "bold"),
            f" for {what} {one_line(profile.model_name)}, minibatch {profile.minibatch}, on cluster "
            f"{one_line(cluster.name)} "
            f"({describe(cluster)})",
        ),
        soft_wrap=True,
    )
    console.print(_stages(outcome))
    console.print(_layers(outcome), soft_wrap=True)
    console.print(_picture(outcome), soft_wrap=True)
    console.print(
        Text.assemble(
            "Predicted: ",
            (f"{show_pace(score.rate)} minibatches/s", "bold"),
            f" ({show_time(score.pace_s)} each, {show_pace(score.rate * profile.minibatch)} samples/s), "
            f"bound by {score.bound}.",
        ),
        soft_wrap=True,
    )
    for line in _gains(outcome.baselines, score.pace_s):
        console.print(line, soft_wrap=True)
    colour = "green" if outcome.verdict.proven else "yellow"
    console.print(Text.assemble("Verdict: ", (outcome.verdict.text, colour), f" ({_seconds(outcome)})"), soft_wrap=True)
    for text in _proof(outcome):
        console.print(text, soft_wrap=True)


def _schedule(plan: Plan) -> str:
    """Nothing for the usual one."""
    if plan.schedule == STASHING:
        return ""
    return f" by {plan.schedule}" + (f", {plan.accumulate} minibatches per update," if plan.accumulate else "")


def _proof(outcome: Outcome) -> list[str]:
    """What keeps the plan from the bound, and where its proof is."""
    lines = []
    score = outcome.evaluation
    if score.pace_s > score.alone_s * (1 + TOLERANCE) and score.bound != AWAITED:
        what = "Shared cores slow" if outcome.problem.cluster.shared_cores else "Shared network cards slow"
        slower = f"{what} it by {score.pace_s / score.alone_s - 1:.1%}, from {show_time(score.alone_s)}"
        bound = f"With that no plan is proven more than {outcome.gap:.2%} faster (bound {show_time(outcome.bound_s)})."
        lines.append(f"{slower}, and every plan to no less." if outcome.gap <= TOLERANCE else f"{slower}. {bound}")
    if outcome.certificate.document is not None:
        lines.append("Certificate: in plan.json; `pipeplan check` verifies it without the solvers.")
    return lines


def describe(cluster: Cluster) -> str:
    """`2 servers × 8 V100 16 GB`; where servers differ, `3 servers: 2 × 8 V100 16 GB + 4 T4`, in their order."""
    (first, devices, name), *others = cluster.kinds
    if others:
        counted = [f"{'' if count == 1 else f'{count} × '}{devices} {name}" for count, devices, name in cluster.kinds]
        return one_line(f"{cluster.servers} servers: {' + '.join(counted)}")
    return one_line(f"{devices} {name}" if first == 1 else f"{first} servers × {devices} {name}")


def _stages(outcome: Outcome) -> Table:
    plan, score = outcome.plan, outcome.evaluation
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    limited = outcome.problem.options.memory
    least = min(cost.capacity_bytes for cost in score.stages)
    # Where the devices differ, a share of each stage's own.
    differ = any(cost.capacity_bytes > least for cost in score.stages)
    capacity = "" if not limited else "of its own" if differ else f"of {show_size(least)}"
    for heading in ("stage", "repl.", "servers", "depth", "compute", "sync", "to next", "link", "memory", capacity):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (stage, cost) in enumerate(zip(plan.stages, score.stages, strict=True), start=1):
        last = number == len(plan.stages)
        again = "*" if stage.recompute else ""
        share = f"{cost.memory_bytes / cost.capacity_bytes:.0%}" if limited else ""
        table.add_row(
            str(number),
            str(stage.replicas),
            _servers(stage.workers, outcome.problem.cluster),
            str(stage.depth),
            show_time(cost.compute_s) + again,
            show_time(cost.synchronisation_s),
            "" if last else show_size(cost.boundary_bytes),
            "" if last else show_time(cost.boundary_s),
            show_size(cost.memory_bytes),
            Text(share, style="red" if cost.memory_bytes > cost.capacity_bytes else ""),
        )
    return table


def _layers(outcome: Outcome) -> Text:
    """From which layer to which every stage goes."""
    lines = Text()
    for number, stage in enumerate(outcome.plan.stages, start=1):
        layers = stage.layers
        span = layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"
        lines.append(f"  stage {number}: ", "dim").append(f"{one_line(span)}\n")
    if any(stage.recompute for stage in outcome.plan.stages):
        lines.append("  * computes its forward pass again for backward, to save memory\n", "dim")
    return lines


def _servers(workers: Iterable[int], cluster: Cluster) -> str:
    """The servers of some workers, as `0-2` or `0,3`."""
    numbers = sorted({cluster.server_of(worker) for worker in workers})
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(str(number) for number in numbers)


def _picture(outcome: Outcome) -> Text:
    """The workers of every server, each drawn as the number of its stage, idle ones as a dot."""
    cluster = outcome.problem.cluster
    stage_of = {worker: number for number, stage in enumerate(outcome.plan.stages, 1) for worker in stage.workers}
    width = len(str(len(outcome.plan.stages)))
    picture = Text()
    shown = min(cluster.servers, 16)
    starts = cluster.starts(cluster.server_level)
    for server, (first, end) in enumerate(itertools.pairwise(starts[: shown + 1])):
        picture.append(f"  server {server:<3} ", "dim")
        for worker in range(first, min(end, first + 16)):
            number = stage_of.get(worker)
            picture.append(f"[{number or '.':>{width}}]", f"color({1 + (number - 1) % 6})" if number else "dim")
        picture.append("\n")
    if shown < cluster.servers or cluster.workers_per_server > 16:
        picture.append(f"  … {cluster.workers} workers in all\n", "dim")
    return picture


def _gains(baselines: tuple[Baseline, ...], pace_s: float) -> list[Text]:
    lines = []
    for baseline in baselines:
        gain = baseline.gain(pace_s)
        name = baseline.name + (f" ({_short(baseline.config)})" if baseline.config else "")
        line = Text(f"  over {name:<41} ")
        if baseline.pace_s is None or gain is None:
            line.append("-", "dim")
        else:
            line.append(f"{gain:.2f}x", "bold")
            line.append(f"  {show_time(baseline.pace_s)}")
        if baseline.remark:
            line.append(f"  {baseline.remark}", "dim")
        lines.append(line)
    return lines


def _short(config: str) -> str:
    """A configuration of many stages by its length."""
    return config if len(config) <= 15 else f"{config.count('-') + 1} stages"


def _seconds(outcome: Outcome) -> str:
    return ", ".join(f"{result.solver} {result.seconds:.2f} s" for result in outcome.results)
