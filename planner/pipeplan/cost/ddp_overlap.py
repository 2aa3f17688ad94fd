"""DDP overlap: the exposed all-reduce time of plain data parallelism.

The next forward pass needs the update, so only the backward pass can hide the all-reduce. The backward pass fills
buckets of a fixed size with gradients, one after another. A bucket's all-reduce begins when the bucket is full and the
previous all-reduce has ended. So the last bucket is always reduced after the pass:

    round = f + b + u + exposed + (1 - overlap) · hidden,    exposed + hidden = the all-reduce

Here f, b and u are the forward pass, the backward pass and the optimiser's step of one minibatch. In a pipeline,
replicated stages update one round late, so the all-reduce may take a whole round (`schedules.update_lag`).

Source of the buckets: Li et al., PyTorch Distributed, VLDB 2020; the executor uses the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.sharded_data_parallel import sharded_passes
from pipeplan.cost.stage_times import group_allreduce_time, parameter_bytes_of
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING
from pipeplan.problem.problem import Problem

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""Capacities of the first and of every further bucket, as in torch's DistributedDataParallel."""


def waits_for_allreduce(plan: Plan) -> bool:
    """Whether a plan trains with plain data parallelism and updates once for the minibatches of all replicas."""
    return len(plan.stages) == 1 and not plan.inference and plan.schedule not in ACCUMULATING


def ddp_exposed_allreduce_s(plan: Plan, problem: Problem, links: Links) -> float:
    """Exposed all-reduce time: the part that remains when the backward pass ends, in seconds per round.

    The result is 0 for pipelines and for schedules that accumulate: no forward pass waits for their all-reduce.
    """
    return _left_of_allreduce_s(plan, problem, links, 0) if waits_for_allreduce(plan) else 0.0


def flush_exposed_allreduce_s(plan: Plan, problem: Problem, links: Links, index: int) -> float | None:
    """Exposed all-reduce time of a stage after its last backward pass before a flush, in seconds, or None.

    The executor sends buckets during that pass, as in plain data parallelism. The formulas of the flush schedules give
    only a lower bound, with one bucket that leaves when the pass begins. The result is None if gradients of weights
    have a separate pass, workers run several stages, layers share weights, replicas divide the optimiser's state, or
    nothing is reduced.
    """
    stage = plan.stages[index]
    if plan.inference or plan.schedule not in FLUSHING or plan.virtual or stage.deferred or stage.replicas == 1:
        return None
    if problem.options.sharding.divides_weights:
        return sharded_passes(plan, problem, links).exposed_s
    if problem.shared or problem.options.shard_optimizer or not parameter_bytes_of(plan, problem, index):
        return None
    return _left_of_allreduce_s(plan, problem, links, index)


def _left_of_allreduce_s(plan: Plan, problem: Problem, links: Links, index: int) -> float:
    """Exposed all-reduce time of a stage whose buckets are sent during the backward pass, in seconds."""
    stage = plan.stages[index]
    if stage.replicas == 1:
        return 0.0
    rate = links.allreduce_among(stage.workers)
    own, speed = set(stage.layers), problem.cluster.speed_of(stage.workers)
    if stage.shares:  # Replicas end together. The fastest one has the shortest last pass, which hides the least.
        speed /= min(problem.cluster.relative_times(stage.workers))
    layers = [layer for layer in problem.profile.layers if layer.name in own]
    recompute_s = sum(layer.forward_s for layer in layers) / speed if stage.recompute else 0.0
    passes = [(layer.backward_s / speed, layer.parameter_bytes) for layer in reversed(layers)]
    return _unhidden_s(
        passes, recompute_s, lambda size: float(formulas.ring_allreduce_time(stage.replicas, size, *rate))
    )


def ddp_step_time_s(plan: Plan, problem: Problem, links: Links, pass_s: float) -> float:
    """Step time in seconds per minibatch of a plan whose forward pass waits for the all-reduce; 0 for other plans.

    `pass_s` is f + b + u of the plan's only stage, on the slowest replica.
    """
    if not waits_for_allreduce(plan):
        return 0.0
    exposed = ddp_exposed_allreduce_s(plan, problem, links)
    hidden = max(0.0, group_allreduce_time(plan, problem, links, 0) - exposed)
    slowed_s = (1.0 - problem.options.overlap) * hidden
    return (pass_s + exposed + slowed_s) / plan.stages[0].replicas


def _unhidden_s(passes: Sequence[tuple[float, int]], recompute_s: float, ring: Callable[[int], float]) -> float:
    """Seconds from the end of the backward pass until the last bucket is reduced.

    `passes` gives (seconds, bytes of gradients) of the layers in the order of backward; the pass begins with
    `recompute_s` seconds of recomputation. `ring` maps a bucket's bytes to the seconds of its all-reduce.
    """
    remaining = sum(seconds for seconds, _ in passes)
    # Times are relative to the end of the pass, because the result is small compared with the pass.
    reduced_s, filled, limit = -remaining - recompute_s, 0, FIRST_BUCKET_BYTES
    for number, (seconds, size) in enumerate(passes, 1):
        remaining = remaining - seconds if number < len(passes) else 0.0
        filled += size
        if filled >= limit:
            reduced_s = max(reduced_s, -remaining) + ring(filled)
            filled, limit = 0, BUCKET_BYTES
    return max(0.0, max(reduced_s, 0.0) + ring(filled) if filled else reduced_s)
