"""How messages travel between stages: the values of `--transport`. Torch-free."""

from __future__ import annotations

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.averaging_options import GradientAveraging
from pipeplan_launch.plan.communication_order import GRADIENT_SLOTS, MOST_UNSETTLED, neighbours
from pipeplan_launch.plan.launch_plan import LaunchPlan

GLOO, NCCL = "gloo", "nccl"
AUTO = "auto"
MODES = (GLOO, NCCL)
"""`gloo`: over Gloo, from the host's memory. `nccl`: in the one order (`communication_order`), with a process group for
every pair of workers and direction.
"""

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


def known_by_its_name(transport: str) -> str:
    """`transport` itself. Raises `ValueError` for the name that `gloo` had in earlier versions."""
    if transport == "host":
        raise ValueError(f"host is called {GLOO} now: give --transport {GLOO}")
    return transport


def asks_self_test(wanted: str, plan: LaunchPlan, averaging: GradientAveraging) -> bool:
    """Whether the mode of a run is what the self-test has found on its machine.

    That is so for a pipeline of several stages on the GPUs of one server. The self-test says nothing about the network
    between servers, nor about what starts all-reduces in another thread or gathers weights.
    """
    here = plan.device == "cuda" and plan.servers == 1 and len(plan.pipeline) > 1
    return wanted == AUTO and here and averaging.plain and plan.schedule.virtual is None


def transport_of(wanted: str, plan: LaunchPlan, averaging: GradientAveraging, found: str | None = None) -> str:
    """The mode of a run, of which `wanted` is the option. Raises `LaunchError` if other options exclude it.

    `found`: the mode that the self-test has found for this machine, if there has been one.
    """
    if wanted == AUTO:
        return found or GLOO if asks_self_test(wanted, plan, averaging) else GLOO
    mode = GLOO if len(plan.pipeline) == 1 else wanted
    if mode != GLOO and averaging.shards_optimizer:
        raise LaunchError(
            f"--transport {mode} has one order for everything that workers exchange, in which --shard-optimizer's "
            "gathering of weights has no place: give --transport gloo, or leave --shard-optimizer out"
        )
    if mode != GLOO and not averaging.plain:
        raise LaunchError(
            f"--transport {mode} starts everything from one thread, and --compress and --significance use another: "
            "leave one of them out"
        )
    if mode != GLOO and plan.schedule.virtual is not None:
        raise LaunchError(
            f"--transport {mode} has one order for the messages of workers with one stage each, and under "
            f"{plan.schedule.name} workers have several: give --transport gloo"
        )
    return mode


def memory_beyond_plan(plan: LaunchPlan) -> list[float]:
    """Bytes that messages by `nccl` take on a worker of each stage beyond what the plan charges; [] if not known.

    In the one order a worker has a ring of slots for what it receives, and keeps what it sends until it has left. The
    plan charges one message each way at each boundary, and the input and output of every minibatch in flight. What
    lies beyond is, in training, one more gradient received and one more that leaves; in inference one more input.
    """
    predictions = plan.predictions
    if any(one.receive_bytes is None or one.receive_gradient_bytes is None for one in predictions):
        return []
    arriving = [one.receive_bytes or 0.0 for one in predictions]
    if not plan.schedule.trains:
        return arriving
    returned = [one.receive_gradient_bytes or 0.0 for one in predictions]
    return [
        (GRADIENT_SLOTS - 1) * received + (MOST_UNSETTLED - 1) * sent
        for received, sent in zip(returned, [0.0, *returned], strict=False)
    ]


def memory_note(plan: LaunchPlan) -> str | None:
    """A note on the memory of messages by `nccl` that the plan does not charge; None where there is none."""
    beyond = memory_beyond_plan(plan)
    most = max(beyond, default=0.0)
    if not most:
        return None
    return (
        f"note: messages by --transport {NCCL} take up to {most / 2**20:.3g} MiB on a worker of stage "
        f"{beyond.index(most)} beyond the memory of the plan"
    )
