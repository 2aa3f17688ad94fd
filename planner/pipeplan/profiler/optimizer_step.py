"""Whole training steps: what the optimiser's step takes, layer by layer, and the most memory that a step needs.

These come after all other passes, because they change the parameters: nothing that is measured later depends on these.

What a job's optimiser keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan.profiler.clock import Clock, median
from pipeplan.profiler.layer_run import Measure
from pipeplan.profiler.memory import recorded
from pipeplan_launch.job.job import Job, StageInfo
from pipeplan_launch.job.user_code import user_code_errors

BUDGET_S = 3.0
FEWEST, MOST = 3, 20
"""Of the steps over all layers that are measured."""
ALONE, ALONE_S = 3, 0.002
"""Measured steps over the parameters of one layer: at least so many, for at least so long."""


@dataclass(frozen=True)
class StepCost:
    """What training steps take besides the passes over the layers."""

    update_s: dict[str, float] = field(default_factory=dict)
    """The optimiser's step by layer: the sum over layers is the whole step's time."""
    peak_bytes: int = 0
    """The most memory of a whole step: parameters, gradients, optimiser state and activations. 0: not measured."""


@dataclass(frozen=True)
class _Owner:
    """A layer and the parameters that it is charged for and trains."""

    layer: str
    names: tuple[str, ...]
    parameters: list[nn.Parameter]

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for one in self.parameters)


def measure_steps(
    job: Job,
    minibatch: int,
    own: Mapping[str, Sequence[str]],
    clock: Clock,
    once: Callable[[], None],
    inputs: Sequence[Tensor],
) -> StepCost:
    """Measure the job's optimiser. `own`: the parameters that each layer is charged for; `once` runs the whole model
    forwards and backwards, so that the parameters have their gradients."""
    owners = _owners(job.model, own)
    everything = _Owner(
        "", tuple(name for one in owners for name in one.names), [p for one in owners for p in one.parameters]
    )
    if not everything.parameters:
        return StepCost()
    device = everything.parameters[0].device
    whole_s, peak = _together(job, _build(job, minibatch, everything), clock, once, inputs)
    alone = {one.layer: _alone(job, minibatch, one, clock) for one in owners}
    job.model.zero_grad(set_to_none=True)
    fixed_s = _fixed(job, clock, device)
    return StepCost(shared(whole_s, alone, {one.layer: one.bytes for one in owners}, fixed_s), peak)


def _together(
    job: Job, optimizer: Optimizer, clock: Clock, once: Callable[[], None], inputs: Sequence[Tensor]
) -> tuple[float, int]:
    """(time of a step over all parameters, peak of a whole training step); the gradients stay."""

    def step() -> None:
        once()
        _step(optimizer)

    start = time.perf_counter()
    step()  # the first one makes the optimiser's state
    quick = time.perf_counter() - start < BUDGET_S / MOST
    job.model.zero_grad(set_to_none=True)
    held = [*job.model.parameters(), *job.model.buffers(), *inputs, *_state(optimizer)]
    peak = _peak(held[0].device, held, step)
    return _timed(optimizer, clock, once if quick else lambda: None), peak


def _owners(model: nn.Module, own: Mapping[str, Sequence[str]]) -> list[_Owner]:
    parameters = dict(model.named_parameters())
    found = []
    for layer, names in own.items():
        trained = tuple(name for name in names if parameters[name].requires_grad)
        if trained:
            found.append(_Owner(layer, trained, [parameters[name] for name in trained]))
    return found


def _build(job: Job, minibatch: int, owner: _Owner) -> Optimizer:
    named = tuple(zip(owner.names, owner.parameters, strict=True))
    with user_code_errors("the job's optimizer"):
        return job.make_optimizer(list(owner.parameters), StageInfo(minibatch=minibatch, named_parameters=named))


def _step(optimizer: Optimizer) -> None:
    with user_code_errors("a step of the job's optimizer"):
        optimizer.step()


def _state(optimizer: Optimizer) -> list[Tensor]:
    return [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]


def _timed(optimizer: Optimizer, clock: Clock, between: Callable[[], None]) -> float:
    """The median time of a step, with the gradients that there are. What runs between two steps is to leave in the
    caches what training does; where that takes long, the parameters are larger than these."""
    handles: list[Callable[[], float]] = []
    start = time.perf_counter()
    while len(handles) < FEWEST or (time.perf_counter() - start < BUDGET_S and len(handles) < MOST):
        between()
        handles.append(clock.measure(lambda: _step(optimizer)))
    clock.settle()
    return median([taken() for taken in handles])


def _alone(job: Job, minibatch: int, owner: _Owner, clock: Clock) -> float | None:
    """The median time of a step over one layer's parameters, by an optimiser of their own; None where there is none."""
    try:
        optimizer = _build(job, minibatch, owner)
        optimizer.step()
    except Exception:
        return None  # made for the whole model only, as one that looks for a layer by its name
    handles: list[Callable[[], float]] = []
    start = time.perf_counter()
    while len(handles) < ALONE or time.perf_counter() - start < ALONE_S:
        handles.append(clock.measure(optimizer.step))
    clock.settle()
    return median([taken() for taken in handles])


def _fixed(job: Job, clock: Clock, device: torch.device) -> float:
    """What a step takes whatever it is over, in seconds: one over two numbers against one over one."""
    times = []
    for count in (1, 2):
        parameters = [nn.Parameter(torch.zeros(1, device=device)) for _ in range(count)]
        for one in parameters:
            one.grad = torch.zeros_like(one)
        found = _alone(job, 1, _Owner("", tuple(f"parameter{index}" for index in range(count)), parameters), clock)
        times.append(0.0 if found is None else found)
    return max(0.0, 2 * times[0] - times[1])


def shared(
    whole_s: float, alone: Mapping[str, float | None], sizes: Mapping[str, int], fixed_s: float
) -> dict[str, float]:
    """The whole step's time by layer, in proportion to what a step over each layer alone takes, less what any step
    takes; by bytes where a layer has no step of its own."""
    parts = {layer: max(0.0, one - fixed_s) for layer, one in alone.items() if one is not None}
    if len(parts) < len(alone) or not sum(parts.values()) > 0.0:
        parts = {layer: float(size) for layer, size in sizes.items()}
    total = sum(parts.values())
    return {layer: whole_s * part / total for layer, part in parts.items()}


def _peak(device: torch.device, held: Sequence[Tensor], step: Callable[[], None]) -> int:
    """Bytes: what is held all along, and the most that comes on top of it. 0 where the allocator does not tell."""

    def once(measure: Measure) -> None:
        measure(step)

    uses = recorded(device, once)
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in held}
    return uses[0].most + sum(storages.values()) if uses else 0


def optimizer_state(job: Job) -> tuple[str, float]:
    """(name, bytes of state per byte of parameters) of the job's optimiser, from a step on two stand-in parameters."""
    parameters = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))]
    names = _names(job.model)
    stage = StageInfo(minibatch=job.minibatch, named_parameters=tuple(zip(names, parameters, strict=True)))
    with user_code_errors("the job's optimizer"):
        optimizer = job.make_optimizer(list(parameters), stage)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(
        value.nbytes
        for parameter in parameters
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor) and value.numel() > 1
    )
    return type(optimizer).__name__, held / sum(parameter.nbytes for parameter in parameters)


def _names(model: nn.Module) -> tuple[str, str]:
    """Of a matrix and of a vector that the model trains: an optimiser may group its parameters by name."""
    trained = [(name, one.ndim) for name, one in model.named_parameters() if one.requires_grad]
    matrix = next((name for name, dimensions in trained if dimensions > 1), "weight")
    vector = next((name for name, dimensions in trained if dimensions == 1 and name != matrix), "bias")
    return matrix, vector
