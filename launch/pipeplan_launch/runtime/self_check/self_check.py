"""Self-check of a job: chooses the samples, checks that memory suffices, and compares."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan_launch.errors import LaunchError, print_status
from pipeplan_launch.job.job import Batch, Job, collate_samples
from pipeplan_launch.job.kept_values import keep
from pipeplan_launch.job.pass_conditions import RandomState, seed_loading
from pipeplan_launch.job.user_code import describe_error, user_code_errors
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.runtime.self_check.check import Check, DifferenceFound, NotDeterministic, TooSlow
from pipeplan_launch.runtime.self_check.differences import OPTION
from pipeplan_launch.runtime.self_check.passes import CPU, Sample
from pipeplan_launch.telemetry.memory import free_bytes
from pipeplan_launch.tracing.trace import TracedModel

# A pipeline of some stages for a traced model that has no plan yet.

STAGES = 3
"""Number of stages. The middle stage receives and sends, and may pass on tensors that it does not read."""


def even_stages(traced: TracedModel, stages: int = STAGES) -> list[list[str]]:
    """The model's layers in their order, cut into `stages` parts with about equal numbers of layers, or into fewer
    parts if layers must stay together.
    """
    names = [layer.name for layer in traced.layers]
    place = {name: index for index, name in enumerate(names)}
    spans = [(min(map(place.__getitem__, group)), max(map(place.__getitem__, group))) for group in traced.together]
    allowed = [cut for cut in range(1, len(names)) if not any(first < cut <= last for first, last in spans)]
    if not allowed:
        return [names]
    wanted = [round(len(names) * part / stages) for part in range(1, stages)]
    cuts = sorted({min(allowed, key=lambda cut: abs(cut - want)) for want in wanted})
    return [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]


STEPS = 2
SAMPLES = 4
"""Samples in a minibatch of the check, if the model takes any batch size."""
COPIES = 7
"""Copies of the weights that the check adds to the model: two states, gradients, and two optimisers' states."""
SHARE_OF_FREE = 0.5
"""Share of the free memory that these copies may take."""
_GIB = 1 << 30


@dataclass(frozen=True)
class SelfCheck:
    """The outcome of a self-check that found no difference."""

    skipped: str = ""
    """Reason why nothing was compared; empty after a comparison."""
    remarks: tuple[str, ...] = ()
    """Remarks for the user on results that do not count as differences."""


def self_check(
    job: Job,
    traced: TracedModel,
    *,
    seed: int,
    free: int | None,
    layers: Sequence[Sequence[str]] | None = None,
    trains: bool = True,
) -> SelfCheck:
    """Train and evaluate the job's module alone and cut into stages, and compare all results.

    `layers`: the layers of each stage; by default some stages of about equal size. `free`: free memory in bytes, None
    if unknown. With `trains` false only evaluation is compared. The model must be on the CPU, and is left as it was.
    Raises `DifferenceFound` or `NotDeterministic`.
    """
    tensors = (*traced.parameters_by_name().values(), *traced.buffers_by_name().values())
    needed = COPIES * sum(tensor.nbytes for tensor in tensors)
    if free is not None and needed > SHARE_OF_FREE * free:
        return SelfCheck(
            f"it would take {needed / _GIB:.1f} GiB of memory, over half of the {free / _GIB:.1f} GiB that are free"
        )
    stages = even_stages(traced) if layers is None else layers
    sizes = dict.fromkeys(
        (min(SAMPLES, traced.minibatch), traced.minibatch) if traced.dynamic_batch else (traced.minibatch,)
    )
    problem = ""
    for size in sizes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user's code warns again where it is measured or trained
                check = Check(job, traced, stages, read_samples(job, size, seed), seed)
                check.run(trains=trains)
            return SelfCheck(remarks=tuple(check.remarks))
        except (DifferenceFound, NotDeterministic):
            raise
        except TooSlow as error:
            return SelfCheck(str(error))
        except Exception as error:  # profiling, or the run itself, meets the same error and says what to do
            problem = str(error) if isinstance(error, LaunchError) else describe_error(error)
    return SelfCheck(problem)


def read_samples(job: Job, size: int, seed: int) -> list[Sample]:
    """The first minibatches of the training data, or example inputs; the data and all generators stay as they were."""
    random_state = RandomState.now(CPU)
    data = keep(job.datasets.train, arrays=False) if job.data is not None else None
    try:
        return [Sample(number, _batch(job, number, size, seed), size) for number in range(STEPS)]
    finally:
        if data is not None:
            data.restore()
        random_state.restore()


def _batch(job: Job, number: int, size: int, seed: int) -> Batch:
    seed_loading(seed, 0, number)
    if job.data is None:
        return job.example(size)
    train: Any = job.datasets.train
    with user_code_errors("the job's data"):
        count = len(train)
        indices = [(number * size + position) % count for position in range(size)]
        return collate_samples([train[index] for index in indices], job.datasets.collate)


# The self-check of a run, at its first worker: the whole model against the plan's own stages.

LARGE_BYTES = 100 << 20
"""From this number of bytes of weights on, the check takes seconds, so a line says what the workers wait for."""


def check_at_start(plan: LaunchPlan, job: Job, traced: TracedModel, seed: int) -> None:
    """Compare training in the plan's stages with plain training. Raises `LaunchError` for a difference."""
    if sum(parameter.nbytes for parameter in traced.model.parameters()) >= LARGE_BYTES:
        print_status("self-check: two training steps of the model alone and in stages")
    trains = plan.mode == "training"
    found = self_check(job, traced, seed=seed, free=free_bytes(), layers=plan.layers, trains=trains)
    for line in (*([_unchecked(found.skipped)] if found.skipped else []), *found.remarks):
        print_status(f"note: {line}")


def say_unchecked(plan: LaunchPlan, job: Job, traced: TracedModel, seed: int) -> None:
    """Say that nothing is compared, because the user turned the check off."""
    print_status(f"note: {_unchecked(OPTION)}")


def _unchecked(why: str) -> str:
    return f"not self-checked, whether the plan's stages train as the model alone does ({why})"
