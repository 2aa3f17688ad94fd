"""Options of a run that its plan restricts: old gradients, averaging among replicas, transport. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.communication_order import GRADIENT_SLOTS, MOST_UNSETTLED
from pipeplan_launch.plan.launch_plan import SHARDED, LaunchPlan
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape

# The age of a schedule's gradients, and the command-line options that act on it.

FLUSH_SCHEDULE = SCHEDULES["1f1b-flush"]
"""The schedule of the first epochs with `--flush-epochs`."""


@dataclass(frozen=True)
class StalenessOptions:
    """Command-line options for gradients that are some updates old."""

    correction: str | None = None
    """`none` or `ef`; None to follow the plan."""
    force: bool = False
    """Whether to correct updates even if the correction harms the job's optimiser."""
    flush_epochs: int = 0
    """Epochs at the start of training in which the pipeline drains before every update."""

    def correction_of(self, plan: LaunchPlan) -> str:
        """The correction of a run of the plan."""
        return plan.correction if self.correction is None else self.correction


AS_PLANNED = StalenessOptions()


def check_staleness_options(options: StalenessOptions, plan: LaunchPlan) -> None:
    """Raise `LaunchError` for an option that the plan's schedule does not need or cannot run."""
    name = plan.schedule.name
    stale = plan.mode == "training" and any(delays(plan))
    if options.correction == "ef" and not stale:
        raise LaunchError(f"--correction ef corrects for old gradients, and this plan ({name}) has none: leave it out")
    if options.flush_epochs and (plan.mode != "training" or plan.schedule.flushes):
        raise LaunchError(f"--flush-epochs is for schedules that do not flush, and this plan's is {name}: leave it out")
    if options.force and options.correction_of(plan) != "ef":
        raise LaunchError("--force-correction goes with --correction ef")


def update_delay(schedule: Schedule, pipeline: Sequence[StageShape], stage: int) -> int:
    """τ: the number of the stage's updates between taking the weights for a gradient and applying the gradient.

    Returns the largest delay of any minibatch in the steady state, from the weight version that the schedule gives to
    each minibatch. The delay is 0 if the schedule flushes.
    """
    size = schedule.group_size(pipeline[stage])
    period = lcm(*(schedule.group_size(shape) for shape in pipeline))
    deepest = max(shape.replicas * (shape.depth + 1) for shape in pipeline)
    start = period * (deepest + 2)
    steady = range(start, start + period)
    return max(minibatch // size - schedule.version(pipeline, stage, minibatch) for minibatch in steady)


def delays(plan: LaunchPlan) -> tuple[int, ...]:
    """`update_delay` of every stage of a plan that trains."""
    return tuple(update_delay(plan.schedule, plan.shapes, stage) for stage in range(len(plan.pipeline)))


def staleness_text(plan: LaunchPlan) -> str | None:
    """Text that says how old the oldest gradients are; None if no gradient is old."""
    ages = delays(plan)
    oldest = max(ages)
    if not oldest:
        return None
    return (
        f"gradients of stage {ages.index(oldest)} are {oldest} update{'s' if oldest > 1 else ''} old under "
        f"{plan.schedule.name}"
    )


def flushed_shapes(plan: LaunchPlan) -> tuple[StageShape, ...]:
    """The pipeline for epochs with a flush, in which all stages average the same number of minibatches in an update.

    The number comes from the plan. If the plan has none, it is the least common multiple of the stages' replica counts.
    """
    minibatches = plan.accumulate or lcm(*(shape.replicas for shape in plan.shapes))
    return tuple(replace(shape, accumulate=minibatches) for shape in plan.shapes)


# One sentence that says how old gradients are, and what an update averages over.
#
# The planner's sentence on the plan is the same (`pipeplan.plan.updates`).

MOST_LISTED = 8
"""Largest number of stages that are all listed."""


def updates_sentence(plan: LaunchPlan) -> str:
    """The sentence for a plan that trains."""
    ages = delays(plan)
    groups = [plan.accumulate or len(stage.workers) for stage in plan.pipeline]
    average = f"an update averages over {_by_stage([group * plan.minibatch for group in groups], 'samples')}"
    if not any(ages):
        return f"Synchronous ({plan.schedule.name}): no gradient is stale; {average}."
    old = _by_stage(ages, "update old" if set(ages) == {1} else "updates old")
    return f"Asynchronous ({plan.schedule.name}): gradients are up to {old}; {average}."


def _by_stage(values: Sequence[int], unit: str) -> str:
    """The value that all stages share, or the values by stage. Of many stages, only the first three and the last."""
    if len(set(values)) == 1:
        return f"{values[0]} {unit}"
    listed = [str(value) for value in values]
    return f"{', '.join(listed if len(listed) <= MOST_LISTED else [*listed[:3], '…', listed[-1]])} {unit} by stage"


BFLOAT16 = "bf16"
_COMPRESSION = re.compile(r"bf16|powersgd(?::([1-9]\d{0,3})(?::(\d{1,9}))?)?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")
EXACT_UPDATES = 10  # torch recommends a tenth of all updates, and requires 2


@dataclass(frozen=True)
class Compression:
    """Compression of gradients among all replicas of a stage, by one of torch's own communication hooks."""

    kind: str
    """`bf16` or `powersgd`."""
    rank: int = 1
    """PowerSGD: rank of the two thin matrices that approximate a parameter's gradient."""
    exact: int = EXACT_UPDATES
    """PowerSGD: number of the job's first updates that are averaged exactly."""


@dataclass(frozen=True)
class GradientAveraging:
    """Averaging of gradients among the replicas of a stage: the exact mean, unless a field is set."""

    compression: Compression | None = None
    significance: float | None = None
    """Only updates above this share of their weight leave a server. Smaller updates accumulate until they exceed it."""
    shards_optimizer: bool | None = None
    """Whether each replica keeps only its part of the optimiser's state, and computes only its part of the step. None
    follows the plan; without a plan it means no."""

    def by_default_of(self, plan: LaunchPlan) -> GradientAveraging:
        """These options, with the plan's choice about dividing the optimiser if the user made no choice."""
        return self if self.shards_optimizer is not None else replace(self, shards_optimizer=plan.shard_optimizer)

    @property
    def plain(self) -> bool:
        """Whether replicas average gradients exactly, and every replica computes the whole step."""
        return not self.shards_optimizer and self.compression is None and self.significance is None


EXACT_AVERAGING = GradientAveraging()


def check_averaging_options(
    averaging: GradientAveraging, plan: LaunchPlan | None = None, compile_backend: str | None = None
) -> None:
    """Raise `LaunchError` for options that exclude each other, or that exclude FSDP if the plan uses it."""
    given = {
        "--compress": averaging.compression,
        "--significance": averaging.significance,
        "--shard-optimizer": averaging.shards_optimizer,
        "--compile": compile_backend,
    }
    if plan is not None and plan.data_parallel in SHARDED and (name := next((n for n in given if given[n]), None)):
        raise LaunchError(
            f"{name} is for workers that hold all weights of a stage, and under this plan ({plan.data_parallel}) each "
            f"holds a part: leave it out, or solve for a plan without FSDP"
        )
    if averaging.shards_optimizer and averaging.significance is not None:
        raise LaunchError(
            "--significance needs the optimiser's state of every weight, and with --shard-optimizer a replica has only "
            "a part of it: leave one of them out"
        )


def parse_compression(text: str) -> Compression:
    """Parse `bf16`, `powersgd`, `powersgd:RANK` or `powersgd:RANK:EXACT`. Raises `ValueError`."""
    match = _COMPRESSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is neither bf16 nor powersgd, powersgd:RANK or powersgd:RANK:EXACT_UPDATES")
    if text == BFLOAT16:
        return Compression(BFLOAT16)
    rank, exact = match.groups()
    return Compression("powersgd", int(rank or 1), EXACT_UPDATES if exact is None else int(exact))


def parse_significance(text: str) -> float:
    """Parse a share such as `1%` or `0.01`, at least 0 and below 100%. Raises `ValueError`."""
    match = _PERCENT.fullmatch(text.strip())
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share < 1:
        raise ValueError(f"{text[:40]!r} is not a share from 0% to below 100%, as in 1% or 0.01")
    return share


# The transport of messages between stages: the values of `--transport`.


GLOO, NCCL = "gloo", "nccl"
AUTO = "auto"
MODES = (GLOO, NCCL)
"""`gloo`: over Gloo, from the host's memory. `nccl`: in the common order (`communication_order`), with a process group
for every pair of workers and direction.
"""

Edge = tuple[int, int]
"""(rank that sends, rank that receives)."""


def edges(plan: LaunchPlan) -> list[Edge]:
    """Every pair of ranks between which a message may travel, sorted: the same list on all workers."""
    found: set[Edge] = set()
    for before, after in pairwise(plan.pipeline):
        ranks = [(one, other) for one in before.workers for other in after.workers]
        found.update(ranks)
        if plan.schedule.trains:
            found.update((other, one) for one, other in ranks)
    return sorted(found)


def asks_self_test(wanted: str, plan: LaunchPlan, averaging: GradientAveraging) -> bool:
    """Whether a run takes the mode that the self-test found on its machine.

    True for a pipeline of several stages on the GPUs of one server. The self-test does not cover the network between
    servers, or options that start all-reduces in another thread or gather weights.
    """
    here = plan.device == "cuda" and plan.servers == 1 and len(plan.pipeline) > 1
    return wanted == AUTO and here and averaging.plain and plan.schedule.virtual is None


def transport_of(wanted: str, plan: LaunchPlan, averaging: GradientAveraging, found: str | None = None) -> str:
    """The transport mode of a run. Raises `LaunchError` if other options exclude it.

    `wanted`: the value of `--transport`. `found`: the mode that the self-test found for this machine; None if it has
    not run.
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
    """Bytes for `nccl` messages that the plan does not include, on a worker of each stage; [] if unknown.

    With `nccl` a worker has a ring of slots for received messages, and keeps every message that it sends until it has
    left. The plan includes one message each way at each boundary, and the input and output of every minibatch in
    flight. Missing are one more received and one more sent gradient in training, and one more input in inference.
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
    """A note on the memory for `nccl` messages that the plan does not include; None if there is none."""
    beyond = memory_beyond_plan(plan)
    most = max(beyond, default=0.0)
    if not most:
        return None
    return (
        f"note: messages by --transport {NCCL} take up to {most / 2**20:.3g} MiB on a worker of stage "
        f"{beyond.index(most)} beyond the memory of the plan"
    )
