"""How messages travel between stages: the values of `--transport`. Torch-free."""

from __future__ import annotations

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.averaging_options import EXACT_AVERAGING, GradientAveraging
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.one_order import neighbours

HOST, NCCL, BATCHED = "host", "nccl", "batched"
AUTO = "auto"
MODES = (HOST, NCCL, BATCHED)
"""`host`: through shared memory on one machine, else over Gloo from the host's memory. `nccl`: in the one order
(`one_order`), with a process group for every pair of workers and direction. `batched`: in the one order, all messages
in one process group, each message as one batch."""

Edge = tuple[int, int]
"""(rank that sends, rank that receives)."""


def edges(plan: LaunchPlan) -> list[Edge]:
    """Every pair of ranks between which a message may travel, sorted: the same list on all workers."""
    found: set[Edge] = set()
    for before, after in neighbours(len(plan.pipeline)):
        ranks = [(one, other) for one in plan.pipeline[before].workers for other in plan.pipeline[after].workers]
        found.update(ranks)
        if plan.schedule.trains:
            found.update((other, one) for one, other in ranks)
    return sorted(found)


def asks_self_test(wanted: str, plan: LaunchPlan, averaging: GradientAveraging) -> bool:
    """Whether the mode of a run is what the self-test has found on its machine.

    That is so for a pipeline of several stages on the GPUs of one server. The self-test says nothing about the network
    between servers, nor about what starts all-reduces in another thread or gathers weights.
    """
    here = plan.device == "cuda" and plan.servers == 1 and len(plan.pipeline) > 1
    return wanted == AUTO and here and averaging == EXACT_AVERAGING


def transport_of(wanted: str, plan: LaunchPlan, averaging: GradientAveraging, found: str | None = None) -> str:
    """The mode of a run, of which `wanted` is the option. Raises `LaunchError` if other options exclude it.

    `found`: the mode that the self-test has found for this machine, if there has been one.
    """
    if wanted == AUTO:
        return found or HOST if asks_self_test(wanted, plan, averaging) else HOST
    mode = HOST if len(plan.pipeline) == 1 else wanted
    if mode != HOST and averaging.shards_optimizer:
        raise LaunchError(
            f"--transport {mode} has one order for everything that workers exchange, in which --shard-optimizer's "
            "gathering of weights has no place: give --transport host, or leave --shard-optimizer out"
        )
    if mode != HOST and averaging != EXACT_AVERAGING:
        raise LaunchError(
            f"--transport {mode} starts everything from one thread, and --compress and --significance use another: "
            "leave one of them out"
        )
    return mode
