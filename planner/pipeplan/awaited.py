"""Plain data parallelism waits for its update: what of its all-reduce the backward pass does not hide.

The next forward pass needs the update, so that nothing but the backward pass is left to hide behind. Gradients leave
in buckets, which close at so many bytes, in the order in which backward fills them; each begins when it is full and
the one before is through, so that the last one always comes after the pass. (In a pipeline, whose replicated stages
update one round late, the all-reduce has the whole round: `cost.update_lag`.)

    round = f + b + u + exposed + (1 - overlap) · hidden,    exposed + hidden = the all-reduce

Source of the buckets: Li et al., PyTorch Distributed, VLDB 2020, as the executor has them (`pipeplan_launch.buckets`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeplan import cost
from pipeplan.links import Links
from pipeplan.plan import ACCUMULATING, Plan
from pipeplan.problem import Problem
from pipeplan.stages import group_allreduce_time

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


def waits(plan: Plan) -> bool:
    """Whether a plan is plain data parallelism that trains, with an update of all replicas' minibatches at a time."""
    return len(plan.stages) == 1 and not plan.inference and plan.schedule not in ACCUMULATING


def exposed_allreduce_s(plan: Plan, problem: Problem, links: Links) -> float:
    """What of the all-reduce is left when the backward pass ends, seconds a round; 0 for plans that do not wait."""
    if not waits(plan) or plan.stages[0].replicas == 1:
        return 0.0
    (stage,) = plan.stages
    rate = links.allreduce_among(stage.workers)
    speed, layers = problem.cluster.speed_of(stage.workers), problem.profile.layers
    again = sum(layer.forward_s for layer in layers) / speed if stage.recompute else 0.0
    passes = [(layer.backward_s / speed, layer.parameter_bytes) for layer in reversed(layers)]
    return _left_s(passes, again, lambda size: float(cost.ring_allreduce_time(stage.replicas, size, *rate)))


def awaited_pace_s(plan: Plan, problem: Problem, links: Links, pass_s: float) -> float:
    """Seconds per minibatch of a plan that waits; 0 for others. `pass_s`: f + b + u of its stage."""
    if not waits(plan):
        return 0.0
    exposed = exposed_allreduce_s(plan, problem, links)
    hidden = max(0.0, group_allreduce_time(plan, problem, links, 0) - exposed)
    beside = (1.0 - problem.options.overlap) * hidden
    return (pass_s + exposed + beside) / plan.stages[0].replicas


def _left_s(passes: Sequence[tuple[float, int]], again: float, ring: Callable[[int], float]) -> float:
    """How long after the backward pass the last bucket is through, from (seconds, bytes of gradients) of the layers in
    the order of backward, which begins after `again` seconds."""
    remaining = sum(seconds for seconds, _ in passes)
    # Counted from the end of the pass: what is left is small beside the pass.
    through, filled, limit = -remaining - again, 0, FIRST_BUCKET_BYTES
    for number, (seconds, size) in enumerate(passes, 1):
        remaining = remaining - seconds if number < len(passes) else 0.0
        filled += size
        if filled >= limit:
            through = max(through, -remaining) + ring(filled)
            filled, limit = 0, BUCKET_BYTES
    return max(0.0, max(through, 0.0) + ring(filled) if filled else through)
