"""Whole training steps: the time of the optimiser's step by layer, the state that it keeps, and the peak memory.

They run after all other passes, because they change the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan.profiler.busy_cores import BusyCores
from pipeplan.profiler.clock import Clock, repeated_s
from pipeplan.profiler.memory import record_memory_use
from pipeplan_launch.job.job import Job, StageInfo
from pipeplan_launch.job.loss import LossState
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.runtime.optimizer_shards import ELEMENTWISE

STEP_BUDGET_S = 3.0
"""Time limit of the measured steps over all layers, if `MIN_STEPS` have run."""
MIN_STEPS, MAX_STEPS = 3, 20
"""Smallest and largest number of measured steps over all layers."""
STAND_IN = 32
"""Length of each dimension of a stand-in, which is a small tensor in place of a parameter."""
_Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their names."""


@dataclass(frozen=True)
class StepCost:
    """Cost of training steps, without the passes over the layers."""

    update_s: dict[str, float] = field(default_factory=dict)
    """Time of the optimiser's step by layer. Their sum plus `fixed_s` is the time of a step over all layers."""
    fixed_s: float = 0.0
    """The time of a step that does not depend on its parameters. No layer's time includes this part."""
    loaded: float = 1.0
    """Ratio: the time of a step with all cores busy, divided by its time alone."""
    peak_bytes: int = 0
    """Peak memory of a whole step: parameters, gradients, optimiser state and activations; 0 if not measured."""


def measure_steps(
    job: Job,
    minibatch: int,
    own: Mapping[str, Sequence[str]],
    clock: Clock,
    run_model: Callable[[], object],
    inputs: Sequence[Tensor],
    load: BusyCores | None = None,
    loss_state: LossState | None = None,
) -> StepCost:
    """Measure the job's optimiser, and if there is a `load`, also under it.

    `own`: the parameters of the model and of `loss_state` that count for each layer. `run_model` runs the whole model
    forward and backward, which gives the parameters their gradients.
    """
    parameters = {**dict(job.model.named_parameters()), **({} if loss_state is None else loss_state.parameters())}
    trained = {}
    for layer, names in own.items():
        if named := [(name, parameters[name]) for name in names if parameters[name].requires_grad]:
            trained[layer] = named
    everything = [pair for named in trained.values() for pair in named]
    if not everything:
        return StepCost()
    optimizer = _make_optimizer(job, minibatch, everything)
    peak_bytes, quick = _first_steps(job, optimizer, run_model, inputs)
    between, loaded = run_model if quick else lambda: None, 1.0
    step_s = _median_step_s(job, optimizer, clock, between)
    if load is not None and step_s > 0.0:
        load.start()
        loaded = _median_step_s(job, optimizer, clock, between) / step_s
        load.stop()
    fixed_s, each_s = _overheads(job, everything[0][1].device, clock, between)
    fixed_s = min(fixed_s, step_s)
    return StepCost(split_step_time(step_s - fixed_s, trained, each_s), fixed_s, loaded or 1.0, peak_bytes)


def _first_steps(
    job: Job, optimizer: Optimizer, run_model: Callable[[], object], inputs: Sequence[Tensor]
) -> tuple[int, bool]:
    """Run two training steps. Returns (their peak memory, whether they are quick enough to be repeated).

    The peak is the bytes of resident tensors plus the bytes that a step adds; 0 if the allocator recorded nothing.
    """

    def step() -> None:
        run_model()
        _step(job, optimizer)

    start = time.perf_counter()
    step()  # the first step creates the optimiser's state
    quick = time.perf_counter() - start < STEP_BUDGET_S / MAX_STEPS
    job.model.zero_grad(set_to_none=True)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    resident = [*trained, *job.model.parameters(), *job.model.buffers(), *inputs, *kept]
    uses = record_memory_use(resident[0].device, lambda measure: measure(step))
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in resident}
    return uses[0].most + sum(storages.values()) if uses else 0, quick


def _make_optimizer(job: Job, minibatch: int, named: _Named) -> Optimizer:
    stage = StageInfo(minibatch=minibatch, named_parameters=tuple(named))
    with user_code_errors("the job's optimizer"):
        return job.make_optimizer([parameter for _, parameter in named], stage)


def _step(job: Job, optimizer: Optimizer) -> None:
    """One step, after clipping where the job clips."""
    with user_code_errors("a step of the job's optimizer"):
        if job.clip_norm is not None:
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, job.clip_norm)
        optimizer.step()


def _median_step_s(job: Job, optimizer: Optimizer, clock: Clock, between: Callable[[], object]) -> float:
    """Median time of a step with the present gradients.

    `between` runs before every step and leaves the caches as training does. If a pass over the model takes long,
    `between` does nothing: the parameters are then larger than the caches.
    """
    return repeated_s(clock, lambda: _step(job, optimizer), MIN_STEPS, MAX_STEPS, STEP_BUDGET_S, between)


def _overheads(job: Job, device: torch.device, clock: Clock, between: Callable[[], object]) -> tuple[float, float]:
    """(time of a step that does not depend on its parameters, time for each parameter of any size), in seconds.

    They are computed from steps over one and over two parameters of one element each.
    """
    times = []
    for count in (1, 2):
        named = [(f"parameter{index}", nn.Parameter(torch.zeros(1, device=device))) for index in range(count)]
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer = _make_optimizer(job, 1, named)
            optimizer.step()
            times.append(_median_step_s(job, optimizer, clock, between))
        except Exception:
            return 0.0, 0.0  # for example an optimiser that looks for parameters of the model by name
    return max(0.0, 2 * times[0] - times[1]), max(0.0, times[1] - times[0])


def split_step_time(whole_s: float, layers: Mapping[str, _Named], each_s: float) -> dict[str, float]:
    """Split the time of a step by layer: `each_s` for each parameter, and the rest in proportion to bytes."""
    counts = {layer: len(named) for layer, named in layers.items()}
    sizes = {layer: sum(parameter.nbytes for _, parameter in named) for layer, named in layers.items()}
    each_s = min(each_s, whole_s / sum(counts.values()))
    byte_s = (whole_s - each_s * sum(counts.values())) / max(1, sum(sizes.values()))
    return {layer: each_s * counts[layer] + byte_s * size for layer, size in sizes.items()}


class OptimizerState(NamedTuple):
    """The properties of a job's optimiser that a plan depends on."""

    name: str
    ratio: float
    """Bytes of the optimiser's state per byte of trained parameters."""
    elementwise: bool
    """Whether its step treats every element of a parameter separately."""


def optimizer_state(job: Job) -> OptimizerState:
    """The state of the job's optimiser, from one step over small stand-ins for the parameters of the model.

    A stand-in has the name, the type and the number of dimensions of its parameter, because an optimiser may treat
    matrices, vectors, and parameters with certain names differently.
    """
    trained = [(name, one) for name, one in job.model.named_parameters() if one.requires_grad]
    trained = trained or [("weight", nn.Parameter(torch.zeros(1, 1))), ("bias", nn.Parameter(torch.zeros(1)))]
    named = [(name, nn.Parameter(torch.zeros(_stand_in(one.ndim), dtype=one.dtype))) for name, one in trained]
    optimizer = _make_optimizer(job, job.minibatch, named)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    _step(job, optimizer)
    state_bytes = 0.0
    for (_, stand_in), (_, parameter) in zip(named, trained, strict=True):
        kept = [one for one in optimizer.state[stand_in].values() if isinstance(one, Tensor) and one.numel() > 1]
        state_bytes += parameter.nbytes * sum(one.nbytes for one in kept) / stand_in.nbytes
    ratio = state_bytes / max(1, sum(parameter.nbytes for _, parameter in trained))
    return OptimizerState(type(optimizer).__name__, ratio, type(optimizer) in ELEMENTWISE)


def _stand_in(dimensions: int) -> tuple[int, ...]:
    """The shape of a small tensor with this number of dimensions, of which at most two are not 1."""
    return (STAND_IN,) * min(dimensions, 2) + (1,) * (dimensions - 2)
