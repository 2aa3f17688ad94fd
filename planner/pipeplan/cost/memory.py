"""The memory of one worker of a stage (docs/cost-model.md, "Memory of one worker")."""

from __future__ import annotations

from pipeplan.cost import formulas
from pipeplan.cost.sharded_data_parallel import sharded_memory
from pipeplan.cost.stage_times import crossing_bytes, parameter_bytes_of, units_of
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.problem import Problem


def worker_memory(plan: Plan, problem: Problem, index: int) -> tuple[float, float]:
    """Memory of one worker of a stage, and of it what every minibatch in flight needs, in bytes.

    The latter includes neither weight versions nor the allocator's share.
    """
    stage_bytes, per_minibatch = stage_memory(plan, problem, index)
    stage_bytes += workspace_of(problem, plan.stages[index])
    return problem.cluster.executor.memory_with(stage_bytes), per_minibatch


def workspace_of(problem: Problem, stage: Stage) -> int:
    """Bytes that the layers of a stage need while they run, one after another; 0 in inference."""
    return max(problem.units[unit].workspace_bytes for unit in units_of(problem, stage))


def stage_memory(plan: Plan, problem: Problem, index: int, held: int | None = None) -> tuple[float, float]:
    """The figures of `worker_memory` without the workspace, the worker itself and the allocator's share.

    `held`: the minibatches whose activations are counted; None for as many as the stage holds at most.
    """
    if problem.options.sharding.divides_weights:
        return sharded_memory(plan, problem)
    units = [problem.units[unit] for unit in units_of(problem, plan.stages[index])]
    parameters = parameter_bytes_of(problem, plan.stages[index])
    received, sent = crossing_bytes(problem, plan, index - 1), crossing_bytes(problem, plan, index)
    fixed = formulas.fixed_memory(
        parameters,
        sum(unit.buffer_bytes for unit in units),
        sum(received) + sum(sent),
        problem.state_ratio,
        problem.training,
    )
    if not problem.training:
        return float(fixed), 0.0
    stage = plan.stages[index]
    saved = sum(unit.saved_bytes for unit in units)
    versions = formulas.version_memory(parameters, plan.versions(index), problem.options.copies_per_version)
    weights = versions + formulas.replica_memory(parameters, stage.replicas)
    weights -= formulas.divided_state(parameters, stage.replicas, problem.divided_ratio)
    once = formulas.recompute_memory(saved, sent[0], stage.recompute)
    per_minibatch = formulas.memory_per_depth(0, saved, received[0], sent[0], recompute=stage.recompute)
    activations = stage.depth * per_minibatch + formulas.deferred_memory(stage.deferred, per_minibatch)
    if held is not None:
        activations = held * per_minibatch
    return float(fixed + weights + once + activations), float(per_minibatch)
