"""The plan that `pipeplan solve` prints: a table of its stages, its gains over baselines, and the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.text import Text

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE
from pipeplan.drawing.fitting_table import FittingTable
from pipeplan.plan.learning_cost import known_learning
from pipeplan.plan.updates import Updates
from pipeplan.planning.baselines import ON_FEWER, PARALLEL, not_taken_because
from pipeplan.planning.plan_kinds import CORRECTED_TEXT
from pipeplan.planning.verdict import slowed_by
from pipeplan.util.text import one_line
from pipeplan.util.units import show_pace, show_size, show_time

if TYPE_CHECKING:  # `describe_cluster` is imported without waiting for the solvers
    from pipeplan.planning.choose_synchrony import SynchronyChoice
    from pipeplan.planning.outcome import Outcome
    from pipeplan.planning.stated.pace import PlanSimulation

EXPENDABLE = ("link", "to next", "servers", "sync", "depth")
"""Columns of the stages that are left out, the first one first, where a terminal is too narrow."""
LONGEST_CONFIG = 15
"""Characters up to which the configuration of a baseline is shown."""


def plan_table(outcome: Outcome) -> Iterator[RenderableType]:
    """An outcome as lines and a table, each to be printed from a line of its own."""
    plan = outcome.plan
    cluster, profile = outcome.problem.cluster, outcome.problem.profile
    purpose = "inference" if plan.inference else "training"
    yield Text.assemble(
        (f"Plan {plan.config}", "bold"),
        f" for {purpose} {one_line(profile.model_name)}, minibatch {profile.minibatch}, on cluster "
        f"{one_line(cluster.name)} ({describe_cluster(cluster)})",
    )
    if not plan.inference:
        updates, correction = Updates.of(plan, profile.minibatch), outcome.problem.options.correction
        corrected = CORRECTED_TEXT if correction != "none" else ""
        yield Text(updates.text + corrected, "" if updates.synchronous else "yellow")
        learning = known_learning(plan, profile.optimizer_name, profile.optimizer_state_ratio, correction)
        if learning is not None:
            yield Text(learning.text)
    yield _stages(outcome)
    yield from _choice(outcome.synchrony)
    yield _layers(outcome)
    yield _picture(outcome)
    yield from _prediction(outcome)
    for line in outcome.throughput.lines:
        yield Text(f"  {line}")
    yield from _rivals(outcome.simulation)
    yield from _gains(outcome)
    yield from _simplicity(outcome)
    colour = "green" if outcome.verdict.proven else "yellow"
    yield Text.assemble("Verdict: ", (outcome.verdict.text, colour), f" ({_seconds(outcome)})")
    yield from _proof(outcome)


def _choice(choice: SynchronyChoice | None) -> Iterator[Text]:
    """Why a synchronous or an asynchronous plan was chosen, and the fastest of both kinds."""
    if choice is None:
        return
    yield Text(f"{choice.reason} The DP alone compared them.")
    for name, candidate in (("synchronous", choice.synchronous), ("asynchronous", choice.asynchronous)):
        if candidate is not None:
            yield Text(f"  {name:<12}  {candidate.text}")
    if choice.parallel is not None and choice.parallel is not choice.synchronous:
        yield Text(f"  data parallel {choice.parallel.text}")
    yield Text("")


def _simplicity(outcome: Outcome) -> Iterator[Text]:
    """Lines on a simpler plan that was taken in place of the fastest one, and on what else runs data parallelism."""
    simplified, plan = outcome.simplification, outcome.plan
    fastest = "" if simplified is None else short_config(simplified.fastest.config, LONGEST_CONFIG)
    if simplified is not None and simplified.within is None:
        yield Text(
            f"Taken by simulation: {simplified.kind}; the plan that is fastest by the formulas, {fastest}, is slower "
            "in it; --no-simulation takes that."
        )
    elif simplified is not None:
        yield Text(
            f"Simplest: {simplified.kind} comes within {simplified.within:.0%} of the fastest plan, {fastest}; "
            "--simplest 0 takes that."
        )
    if len(plan.stages) == 1 and plan.busy > 1 and not plan.inference:
        if plan.copies == 1:
            yield Text("This is data parallelism: torch's DDP runs it as well, and FSDP where memory is short.")
        else:
            yield Text("This is data parallelism with a hierarchical all-reduce, which NCCL may choose by itself.")


def _prediction(outcome: Outcome) -> Iterator[Text]:
    """The pace to expect, and that of the formulas where a simulation differs from it."""
    score, simulation = outcome.evaluation, outcome.simulation
    rate = 1 / outcome.predicted_s if outcome.predicted_s > 0 else float("inf")
    yield Text.assemble(
        "Predicted: ",
        (f"{show_pace(rate)} minibatches/s", "bold"),
        f" ({show_time(outcome.predicted_s)} each, {show_pace(rate * outcome.problem.profile.minibatch)} samples/s), ",
        "simulated." if simulation.differs else f"bound by {score.bound}.",
    )
    if simulation.note:
        yield Text(f"Not simulated: {simulation.note}.", "dim")
    ratio = simulation.stated_ratio
    if simulation.differs and ratio is not None:
        yield Text.assemble(
            f"  By the formulas, which the verdict is about: {show_time(score.pace_s)} each, bound by {score.bound}. "
            "The simulation takes ",
            (f"{ratio:.2f} x", "bold yellow" if ratio > 1 else "bold"),
            " as long; `pipeplan simulate` shows where the workers wait.",
        )


def _rivals(simulation: PlanSimulation) -> Iterator[Text]:
    """Lines on plans that are faster in the simulation."""
    for rival in simulation.faster:
        simulated_s = rival.simulated_s or 0.0
        yield Text(
            f"  {rival.plan.config} ({rival.name}) is predicted at {show_time(rival.predicted_s)}, and simulated at "
            f"{show_time(simulated_s)}"
        )


def _proof(outcome: Outcome) -> list[str]:
    """Sentences on what slows the plan, and on where its proof is."""
    lines = []
    score = outcome.evaluation
    if (cause := slowed_by(score)) and score.bound != WAITS_FOR_UPDATE:
        slower = f"it by {score.pace_s / score.alone_s - 1:.1%}, from {show_time(score.alone_s)}"
        lines.append(f"{cause.capitalize()} slow {slower} with each resource to itself.")
    if outcome.certificate.document is not None:
        lines.append("Certificate: in plan.json; `pipeplan check` verifies it without the solvers.")
    return lines


def describe_cluster(cluster: Cluster) -> str:
    """A cluster in a few words: `2 servers × 8 V100 16 GB`, or `3 servers: 2 × 8 V100 16 GB + 4 T4`."""
    (first, devices, name), *others = cluster.kinds
    if others:
        counted = [f"{'' if count == 1 else f'{count} × '}{devices} {name}" for count, devices, name in cluster.kinds]
        return one_line(f"{cluster.servers} servers: {' + '.join(counted)}")
    return one_line(f"{devices} {name}" if first == 1 else f"{first} servers × {devices} {name}")


def _stages(outcome: Outcome) -> FittingTable:
    plan, score = outcome.plan, outcome.evaluation
    table = FittingTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, expendable=EXPENDABLE)
    limited = outcome.problem.options.memory
    least = min(cost.capacity_bytes for cost in score.stages)
    # In a heterogeneous cluster the column shows the share of each stage's own capacity.
    differ = any(cost.capacity_bytes > least for cost in score.stages)
    capacity = "" if not limited else "of its device" if differ else f"of {show_size(least)}"
    for heading in ("stage", "repl.", "servers", "depth", "compute", "sync", "to next", "link", "memory", capacity):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (stage, cost) in enumerate(zip(plan.stages, score.stages, strict=True), start=1):
        last = number == len(plan.stages)
        recomputed = "*" if stage.recompute else ""
        share = f"{cost.memory_bytes / cost.capacity_bytes:.0%}" if limited else ""
        table.add_row(
            str(number),
            str(stage.replicas),
            _servers(stage.workers, outcome.problem.cluster),
            str(stage.depth),
            show_time(cost.compute_s) + recomputed,
            show_time(cost.synchronisation_s),
            "" if last else show_size(cost.boundary_bytes),
            "" if last else show_time(cost.boundary_s),
            show_size(cost.memory_bytes),
            Text(share, style="red" if cost.memory_bytes > cost.capacity_bytes else ""),
        )
    return table


def _layers(outcome: Outcome) -> Text:
    """The first and the last layer of every stage, a line for each."""
    lines = Text()
    for number, stage in enumerate(outcome.plan.stages, start=1):
        layers = stage.layers
        span = layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"
        lines.append(f"  stage {number}: ", "dim").append(f"{one_line(span)}\n")
    if any(stage.recompute for stage in outcome.plan.stages):
        lines.append("  * computes its forward pass again for backward, to save memory\n", "dim")
    return lines


def _servers(workers: Iterable[int], cluster: Cluster) -> str:
    """The numbers of the servers that hold the workers, as `0-2` or `0,3`."""
    numbers = sorted({cluster.server_of(worker) for worker in workers})
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(str(number) for number in numbers)


def _picture(outcome: Outcome) -> Text:
    """The workers of every server: each is drawn as the numbers of its stages, an idle one as a dot."""
    cluster = outcome.problem.cluster
    stages_of: dict[int, list[int]] = {}
    for number, stage in enumerate(outcome.plan.stages, 1):
        for worker in stage.workers:
            stages_of.setdefault(worker, []).append(number)
    width = max(len(_own_stages(numbers)) for numbers in stages_of.values())
    picture = Text()
    shown = min(cluster.servers, 16)
    starts = cluster.starts(cluster.server_level)
    for server, (first, end) in enumerate(itertools.pairwise(starts[: shown + 1])):
        picture.append(f"  server {server:<3} ", "dim")
        for worker in range(first, min(end, first + 16)):
            numbers = stages_of.get(worker, [])
            colour = f"color({1 + (numbers[0] - 1) % 6})" if numbers else "dim"
            picture.append(f"[{_own_stages(numbers):>{width}}]", colour)
        picture.append("\n")
    if shown < cluster.servers or cluster.workers_per_server > 16:
        picture.append(f"  … {cluster.workers} workers in all\n", "dim")
    return picture


def _own_stages(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers)) or "."


def _gains(outcome: Outcome) -> list[Text]:
    """The speedup over each baseline by stated paces, a line for each."""
    lines = []
    baselines, stated_s = outcome.baselines, outcome.predicted_s
    # A factor is over the best plan of its kind on any workers.
    fewer_s = min((one.stated_s for one in baselines if one.name == ON_FEWER and one.stated_s), default=float("inf"))
    for baseline in baselines:
        gain = baseline.gain(stated_s)
        name = baseline.name + (f" ({short_config(baseline.config, LONGEST_CONFIG)})" if baseline.config else "")
        line = Text(f"  over {name:<41} ")
        if baseline.stated_s is None or gain is None:
            line.append("-", "dim")
        elif baseline.name == PARALLEL and fewer_s < baseline.stated_s:
            line.append("-", "dim").append(f"  {show_time(baseline.stated_s)}  slower than on fewer workers", "dim")
        else:
            line.append(f"{gain:.2f}x" if gain >= 1 else f"{gain:.3f}x", "bold")
            line.append(f"  {show_time(baseline.stated_s)}")
            if reason := not_taken_because(baseline, outcome.plan, stated_s, outcome.problem):
                line.append(f"  {reason}", "dim")
        if baseline.remark:
            line.append(f"  {baseline.remark}", "dim")
        if baseline.simulation.note:
            line.append(f"  by the formulas: {baseline.simulation.note}", "dim")
        lines.append(line)
    return lines


def short_config(config: str, most: int) -> str:
    """The configuration, or the number of its stages if it is longer than `most` characters."""
    return config if len(config) <= most else f"{config.count('-') + 1} stages"


def _seconds(outcome: Outcome) -> str:
    """How long each solver ran."""
    return ", ".join(f"{result.solver} {result.seconds:.2f} s" for result in outcome.results)
