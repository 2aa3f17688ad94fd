"""The stages of a plan, the parts of their memory, their placement on workers, and simulated memory over time."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.cost import formulas
from pipeplan.cost.sharded_data_parallel import shard_groups
from pipeplan.drawing.tables import server_numbers
from pipeplan.problem.options import Sharding
from pipeplan.report.document import StageMemory, StageRow, table_columns
from pipeplan.report.source import ReportSource
from pipeplan.report.timeline import ReportSimulation
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.simulation.memory import memory_over_time
from pipeplan.simulation.scenario import PredictedStage
from pipeplan.util.text import one_line

PREDICTED = ("forward_s", "backward_s", "update_s", "sync_s", "send_bytes", "parameter_bytes", "memory_bytes")
"""Figures of a row that plan.json has under the same names."""
MAX_SERVERS = 256
"""Largest number of servers whose workers are listed."""
MAX_MEMORY_STAGES = 100
"""Largest number of stages that are shown."""
MAX_MEMORY_POINTS = 8_000
"""Largest number of points of all stages together."""


def stage_rows(source: ReportSource) -> list[StageRow]:
    """One row for every stage, from the input to the output."""
    rows = []
    for index, (stage, predicted) in enumerate(zip(source.plan.stages, source.stated.prediction.stages, strict=True)):
        rows.append(
            StageRow(
                index=index,
                layers=len(stage.layers),
                first=one_line(stage.layers[0]) if stage.layers else "",
                last=one_line(stage.layers[-1]) if stage.layers else "",
                workers=list(stage.workers),
                servers=server_numbers(stage.workers, source.problem.cluster),
                return_bytes=predicted.receive_gradient_bytes,
                capacity_bytes=source.capacity_bytes(stage.workers),
                memory_parts=memory_parts(source, index, predicted),
                **{name: getattr(stage, name) for name in ("depth", "versions", "recompute")},
                **{name: getattr(predicted, name) for name in PREDICTED},
            )
        )
    return rows


def memory_parts(source: ReportSource, index: int, predicted: PredictedStage) -> list[tuple[str, int]]:
    """Names and bytes of the parts of a worker's memory in the cost model. The parts add up to that memory."""
    stage = source.plan.stages[index]
    profile, problem = source.problem.profile, source.problem
    parameters, minibatch_bytes = predicted.parameter_bytes, predicted.minibatch_bytes
    divided = source.stated.data_parallel in (Sharding.FULL, Sharding.HYBRID)
    if source.plan.inference:
        parts = [("weights", parameters)]
    elif divided:
        shard = round(parameters / len(shard_groups(source.plan, problem)[0]))
        parts = [("shard of the weights", shard), ("shard of the gradients", shard)]
        parts.append(("shard of the optimiser's state", round(shard * profile.optimizer_state_ratio)))
        parts.append(("activations of 1 microbatch in flight", minibatch_bytes))
    else:
        state = parameters * profile.optimizer_state_ratio
        state -= formulas.divided_state(parameters, stage.replicas, problem.divided_ratio)
        parts = [(f"weights, {_counted(stage.versions, 'version')}", stage.versions * parameters)]
        parts += [("gradients", parameters), ("optimiser's state", round(state))]
        if problem.options.correction != "none":
            parts.append(("steps kept to correct updates", (stage.versions - 1) * parameters))
        if stage.replicas > 1:
            parts.append(("buckets of the all-reduce", parameters))
        parts.append(
            (f"activations of {_counted(stage.depth, 'microbatch', 'es')} in flight", stage.depth * minibatch_bytes)
        )
        deferred = round(float(formulas.deferred_memory(stage.deferred, minibatch_bytes)))
        parts.append(("weight gradients that wait for idle time", deferred))
        if stage.recompute:
            parts.append(("activations of the microbatch computed again", _recomputed(source, stage.layers, predicted)))
        if not source.plan.virtual:
            held = set(stage.layers)
            largest = max(layer.workspace_bytes for layer in profile.layers if layer.name in held)
            parts.append(("the largest workspace of a layer", largest))
    costs = source.problem.cluster.executor
    within = costs.room_in(predicted.memory_bytes)
    own = [
        ("the worker itself", round(costs.worker_bytes)),
        ("the allocator's share", round(costs.allocator_share * within)),
    ]
    rest = predicted.memory_bytes - sum(size for _, size in [*parts, *own])
    name = "gathered weights and gradients, and buffers" if divided else "messages and buffers"
    return [(part, size) for part, size in [*parts, (name, rest), *own] if size > 0]


def _recomputed(source: ReportSource, layers: Sequence[str], predicted: PredictedStage) -> int:
    """Bytes of the activations that a stage with recomputation holds for the microbatch that it computes again."""
    own_layers = set(layers)
    saved = sum(unit.saved_bytes for unit in source.problem.units if unit.layers[0] in own_layers)
    return round(saved) + predicted.send_bytes


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{plural if count != 1 else ''}"


def placement_rows(source: ReportSource) -> list[dict[str, object]]:
    """The workers of every server, each with its stage (-1 for none). At most `MAX_SERVERS` servers are listed."""
    stage_of = {worker: index for index, stage in enumerate(source.plan.stages) for worker in stage.workers}
    starts = list(source.problem.cluster.starts(source.problem.cluster.server_level))
    rows: list[dict[str, object]] = []
    for server in range(min(len(starts) - 1, MAX_SERVERS)):
        workers = range(starts[server], starts[server + 1])
        rows.append({"server": server, "workers": [[worker, stage_of.get(worker, -1)] for worker in workers]})
    return rows


def memory_rows(
    source: ReportSource, simulated: ReportSimulation, end_s: float, run: MeasuredRun | None
) -> list[StageMemory]:
    """Memory of one worker per stage until `end_s`. If there are very many stages, an evenly spaced selection is shown.

    The measured peak of a stage in a run is the peak of its fullest worker.
    """
    measured = {} if run is None else {stage.stage: stage.memory_bytes.measured for stage in run.summary.stages}
    stages = source.scenario.stages
    count = min(len(stages), MAX_MEMORY_STAGES)
    shown = sorted({round(at * (len(stages) - 1) / max(count - 1, 1)) for at in range(count)})
    memory = memory_over_time(simulated.scenario, simulated.replayed, simulated.report.minibatches)
    fullest: dict[int, tuple[int, int]] = {}
    for (stage, replica), steps in memory.items():
        peak = max((size for _, size in steps), default=0)
        if stage not in fullest or peak > fullest[stage][0]:
            fullest[stage] = peak, replica
    rows = []
    for stage in shown:
        if stage not in fullest:
            continue
        peak, replica = fullest[stage]
        load, steps = stages[stage], memory[stage, replica]
        at_first = load.memory_bytes if source.plan.inference else load.fixed_bytes + load.parameter_bytes
        points = _thinned(
            [(0.0, at_first), *(step for step in steps if step[0] <= end_s)], MAX_MEMORY_POINTS // len(shown)
        )
        rows.append(
            StageMemory(
                stage=stage,
                worker=load.workers[replica],
                capacity_bytes=source.capacity_bytes(load.workers),
                planned_bytes=load.memory_bytes,
                peak_bytes=max(peak, at_first),
                predicted=table_columns(("t", "bytes"), points),
                measured_peak_bytes=None if (size := measured.get(stage)) is None else round(size),
            )
        )
    return rows


def _thinned(steps: list[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """The steps that change the memory. Above `most` steps, each group of consecutive steps keeps only the highest."""
    kept = [steps[0]]
    for time_s, size in steps[1:]:
        if time_s == kept[-1][0]:
            kept[-1] = time_s, size
        elif size != kept[-1][1]:
            kept.append((time_s, size))
    if len(kept) <= most:
        return kept
    run = -(-len(kept) // most)
    return [max(kept[at : at + run], key=lambda step: step[1]) for at in range(0, len(kept), run)]
