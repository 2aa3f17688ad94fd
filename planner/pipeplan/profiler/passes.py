"""Passes over a model: one to inspect it, some to warm up, and measured ones until their times are precise enough.

A measured pass runs the model layer by layer, and then as a whole.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeplan.errors import InputError
from pipeplan.profiler.clock import Clock, Overhead, interquartile_range, measure_overhead, median
from pipeplan.profiler.concurrent import MeasuringGroup
from pipeplan.profiler.duplicate_layers import DuplicateFinder
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import SavedBytes, measure_workspaces
from pipeplan.profiler.optimizer_step import StepCost, measure_steps
from pipeplan.profiler.options import Progress
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.tracing.layers import LOSS_LAYER

LONGEST_LAYERS_SHARE = 0.9
"""Share of the total time that the longest layers make up, for which an aim has a bound."""
MIN_JUDGED_PASSES = 5
"""Number of passes before the spread is judged."""
DRIFT_BOUND = 0.05
"""Relative change of the total, from the first to the last third of the passes, above which it is reported."""
DRIFT_STANDARD_ERRORS = 4.0
"""Number of standard errors that a change must exceed to count as drift."""
MIN_MEASURED_PASSES, MAX_MEASURED_PASSES = 3, 200
"""Smallest and largest number of measured passes if the number is not given."""
LONG_PASS_S = 1.0
"""Duration of a long pass. One long pass suffices to warm up. It also leaves nothing in the caches for the next pass,
so that the whole model need not run after every pass over the layers."""
WHOLE_EVERY = 3
"""If passes are long, the whole model runs after each of the first `WHOLE_EVERY` passes, then after one in so many."""


@dataclass(frozen=True)
class Aim:
    """How precisely a minibatch size is measured, if the number of passes is not given."""

    total: float
    """Passes go on until the standard error of the median total is below this share of the median …"""
    layer: float
    """… and that of each of the longest layers is below this share of the layer's time."""
    least_s: float
    """Least duration of the measured passes, to notice changes of the machine's speed."""
    budget_s: float
    """Time limit of the measured passes."""


THOROUGH = Aim(0.01, 0.03, 1.0, 25.0)
BRIEF = Aim(0.02, 0.06, 0.25, 3.0)
"""For the sizes that are measured beside the profile's own without having been asked for."""


@dataclass
class Samples:
    """Times of the layers that were run, and of the whole model, in seconds: one for each pass."""

    weights: Mapping[str, int] = field(default_factory=dict)
    """Number of layers that a measured layer stands for; 1 for a layer that is missing here."""
    forward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole_forward: list[float] = field(default_factory=list)
    whole_backward: list[float] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Number of passes."""
        return len(next(iter(self.forward.values()), []))

    def totals(self, times_by_layer: Mapping[str, Sequence[float]]) -> list[float]:
        """The sum over all layers of the model, for each pass."""
        weighted = ([self.weights.get(name, 1) * time_s for time_s in times] for name, times in times_by_layer.items())
        return [sum(times) for times in zip(*weighted, strict=True)]

    def by_layer(self) -> dict[str, list[float]]:
        """Forward plus backward times of each layer that was run."""
        return {
            name: [a + b for a, b in zip(times, self.backward[name], strict=True)]
            for name, times in self.forward.items()
        }


def standard_error(times: Sequence[float]) -> float:
    """Relative standard error of the median: 1.2533 σ / (√n · median).

    σ is that of a normal distribution with the interquartile range of the times, IQR / 1.349.
    """
    middle = median(times)
    if middle <= 0.0 or len(times) < 2:
        return 0.0 if len(times) > 1 else math.inf
    return 1.2533 * interquartile_range(times) / 1.349 / math.sqrt(len(times)) / middle


def uncertainty(samples: Samples) -> tuple[float, float, str]:
    """Relative standard error of the total, the largest one of the longest layers, and that layer's name."""
    by_layer = samples.by_layer()
    total = standard_error(samples.totals(by_layer))
    cost = {name: median(times) * samples.weights.get(name, 1) for name, times in by_layer.items()}
    remaining, worst, worst_layer = LONGEST_LAYERS_SHARE * sum(cost.values()), 0.0, ""
    for name in sorted(cost, key=lambda layer: -cost[layer]):
        if remaining <= 0.0:
            break
        remaining -= cost[name]
        error = standard_error(by_layer[name])
        if error >= worst:
            worst, worst_layer = error, name
    return total, worst, worst_layer


def is_precise_enough(samples: Samples, aim: Aim) -> bool:
    """Whether the standard errors are small enough to stop measuring."""
    if samples.passes < MIN_JUDGED_PASSES:
        return False
    total, worst, _ = uncertainty(samples)
    return total <= aim.total and worst <= aim.layer


def relative_drift(totals: Sequence[float]) -> float | None:
    """Relative change of the totals from the first third of the passes to the last; None if chance explains it.

    The medians of the thirds are compared, so that single disturbed passes do not matter.
    """
    third = len(totals) // 3
    if third < 3:
        return None
    first, last = totals[:third], totals[-third:]
    start, end = median(first), median(last)
    if start <= 0.0:
        return None
    chance = math.hypot(standard_error(first) * start, standard_error(last) * end)
    change = end - start
    return change / start if abs(change) > max(DRIFT_BOUND * start, DRIFT_STANDARD_ERRORS * chance) else None


def sample_notes(samples: Samples, aim: Aim) -> tuple[str, ...]:
    """Sentences that warn of drift, and of a spread above the aim."""
    notes = []
    totals = samples.totals(samples.by_layer())
    changed = relative_drift(totals)
    if changed is not None:
        direction = "slower" if changed > 0 else "faster"
        notes.append(
            f"the machine became {abs(changed):.0%} {direction} while it measured (the last third of {len(totals)} "
            "passes against the first): heat, a changing clock or other load; measure again when it is quiet"
        )
    total, worst, worst_layer = uncertainty(samples)
    if samples.passes >= 2 and (total > aim.total or worst > aim.layer):
        notes.append(
            f"the spread is larger than aimed at: after {samples.passes} passes the total is known to "
            f"{total:.1%} and {worst_layer} to {worst:.1%} (aim: {aim.total:.0%} and {aim.layer:.0%}, "
            "standard error)"
        )
    return tuple(notes)


class Passes:
    """Runs passes over the model, layer by layer and as a whole."""

    def __init__(self, job: Job, run: LayerRun, clock: Clock, progress: Progress, company: MeasuringGroup) -> None:
        self.job, self.run, self.clock, self.progress, self.company = job, run, clock, progress, company
        self.overhead = Overhead(0.0, 0.0)
        self.warmed = 0
        """Number of passes that warmed up, layer by layer and as a whole."""
        self._long = False

    def inspect(self, ref: str, *, measure_all: bool = False) -> dict[str, int]:
        """Run one full pass that checks for NaN and, unless `measure_all`, finds duplicate layers.

        Returns the bytes that each layer saves for backward. Raises `InputError` if the model cannot be run or trained.
        """
        self.progress(0, 0, "first pass")
        model = self.job.model
        saved = SavedBytes([*model.parameters(), *model.buffers(), *self.run.batch.inputs])
        modules = {layer.name: layer.module for layer in self.run.traced.layers}
        self.run.watcher = observer = DuplicateFinder(self.run)
        try:
            self.run.forward(
                self.clock.measure, saved.watch, lambda layer, made: _check_outputs(ref, layer, modules[layer], made)
            )
        except (LaunchError, InputError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise InputError(f"{ref!r} cannot be run on a minibatch of its data: {describe_error(error)}") from error
        self.run.backward(self.clock.measure)
        self.run.watcher = None
        self._clear()
        if not measure_all:
            self.run.alike = observer.classes()
        return dict(saved.by_layer)

    def warm_up(self, passes: int) -> None:
        """Run passes that are not measured, at most `passes`, then measure the time of an empty layer."""
        took_s = 0.0
        while self.warmed == 0 or (self.warmed < passes and took_s < LONG_PASS_S):
            self.progress(0, 0, "warming up")
            start = time.perf_counter()
            self._run_both(None)
            took_s = time.perf_counter() - start
            self.warmed += 1
        self._long = took_s >= LONG_PASS_S
        self.progress(0, 0, "calibrating")
        passes = max(1, min(20, int(LONG_PASS_S / 2 / took_s)))
        self.overhead = measure_overhead(self.run, self.clock, self.run.batch.inputs[0].device, passes)

    def measure(self, repeats: int | None, aim: Aim = THOROUGH) -> Samples:
        """Run `repeats` measured passes, or, if it is None, until the aim is reached or its time is spent."""
        samples = Samples(self.run.weights)
        self.company.start()
        start, enough = time.perf_counter(), False
        while not enough:
            self.progress(samples.passes, repeats or 0, "measuring")
            self._run_both(samples)
            done, spent_s = samples.passes, time.perf_counter() - start
            if repeats is not None:
                enough = done >= repeats
            else:
                spent = spent_s * (done + 1) / done > aim.budget_s
                enough = done >= MIN_MEASURED_PASSES and (
                    spent or done >= MAX_MEASURED_PASSES or (spent_s >= aim.least_s and is_precise_enough(samples, aim))
                )
        self.company.finish(lambda: self._run_both(None))
        self.progress(samples.passes, samples.passes, "done")
        return samples

    def workspaces(self) -> dict[str, int]:
        """Run one more pass, for the workspace of each layer in bytes."""
        workspaces = measure_workspaces(self.run, self.run.device)
        self._clear()
        return workspaces

    def steps(self, own: Mapping[str, Sequence[str]]) -> StepCost:
        """Measure whole training steps, after all other passes. `own` names the parameters charged to each layer."""
        self.progress(0, 0, "the optimiser's step")
        self.company.start()
        cost = measure_steps(self.job, self.run.minibatch, own, self.clock, self._run_whole, self.run.batch.inputs)
        self.company.finish(self._run_whole)
        self.progress(1, 1, "done")
        return cost

    def _run_whole(self) -> None:
        self.whole()

    def _run_both(self, samples: Samples | None) -> None:
        """Run the layers, then the whole model: in turn, so that a machine that becomes slower slows both down."""
        done = samples.passes if samples is not None else 0
        forward = self.run.forward(self.clock.measure)
        backward = self.run.backward(self.clock.measure)
        self._clear()
        whole = self.whole() if not self._long or done < WHOLE_EVERY or done % WHOLE_EVERY == 0 else ()
        self._clear()
        self.clock.settle()
        if samples is not None:
            for name, seconds in forward.items():
                samples.forward[name].append(max(0.0, seconds() - self.overhead.forward_s))
            for name, seconds in backward.items():
                samples.backward[name].append(max(0.0, seconds() - self.overhead.backward_s))
            if whole:
                samples.whole_forward.append(whole[0]())
                samples.whole_backward.append(whole[1]())

    def whole(self) -> tuple[Callable[[], float], Callable[[], float]]:
        """Time forward and backward of the model as its author wrote it."""
        losses: list[Tensor] = []
        batch = self.run.batch

        def forward() -> None:
            with self.run.precision():
                losses.append(self.run.loss(batch.call(self.job.model), batch.target))

        forward_s = self.clock.measure(forward)
        return forward_s, self.clock.measure(lambda: losses.pop().backward())  # type: ignore[no-untyped-call]

    def _clear(self) -> None:
        self.job.model.zero_grad(set_to_none=True)


def _check_outputs(ref: str, layer: str, module: str, outputs: Sequence[Tensor]) -> None:
    """Raise `InputError` for NaN in the outputs of a layer, and for a loss that cannot be trained on."""
    if layer == LOSS_LAYER:
        _check_loss(ref, outputs[0])
    elif any(bool(tensor.isnan().any()) for tensor in outputs if tensor.is_floating_point()):
        where = f" (in the module {module!r})" if module and module != layer else ""
        raise InputError(
            f"layer {layer!r}{where} of {ref!r} produces NaN on a minibatch of its data: "
            "check the inputs and the initial weights"
        )


def training_loss(job: Job, batch: Batch) -> Callable[[Any, Any], Tensor]:
    """The job's loss, or `sum_of_outputs` if the job has no loss or the batch no target."""
    return job.loss if job.loss is not None and batch.target is not None else sum_of_outputs


def sum_of_outputs(output: Any, target: Any) -> Tensor:
    """Sum of all outputs that have a gradient: a scalar to start a backward pass from if there is no loss.

    Raises `LaunchError` if no output has a gradient.
    """
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise LaunchError("no output of the model has a gradient: nothing in it can be trained")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


def _check_loss(ref: str, loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the loss of {ref!r} must be a single number, not {shape}")
    if not bool(torch.isfinite(loss).all()):
        raise InputError(f"the loss of {ref!r} is {loss.item()} on a minibatch of its data: check data and weights")
    if not loss.requires_grad:
        raise InputError(f"the loss of {ref!r} does not depend on any parameter that can be trained")
