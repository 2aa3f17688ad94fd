"""The memory of one worker of a stage (docs/cost-model.md, "Memory of one worker")."""

from __future__ import annotations

from pipeplan.cost import formulas
from pipeplan.cost.stage_times import crossing_bytes, parameter_bytes_of, units_of
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem


def worker_memory(plan: Plan, problem: Problem, index: int, held: int | None = None) -> tuple[float, float]:
    """Memory of one worker of a stage, and its part for each minibatch in flight without weight versions, in bytes.

    `held`: the minibatches whose activations are counted; None for as many as the stage holds at most.
    """
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
    once = formulas.recompute_memory(saved, sent[0], stage.recompute)
    per_minibatch = formulas.memory_per_depth(0, saved, received[0], sent[0], recompute=stage.recompute)
    activations = stage.depth * per_minibatch + formulas.deferred_memory(stage.deferred, per_minibatch)
    if held is not None:
        activations = held * per_minibatch
    return float(fixed + weights + once + activations), float(per_minibatch)
