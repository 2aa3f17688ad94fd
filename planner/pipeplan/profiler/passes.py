"""Passes over a model: one to inspect it, some to warm up, and measured passes until their times are precise enough.

A measured pass runs the model layer by layer, and then as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeplan.errors import InputError
from pipeplan.profiler.busy_cores import BusyCores
from pipeplan.profiler.clock import THOROUGH, Aim, Clock, Samples, Series
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import SavedBytes, measure_workspaces
from pipeplan.profiler.optimizer_step import StepCost, measure_steps, optimizer_state
from pipeplan.profiler.options import Progress
from pipeplan.profiler.overhead import Overhead, measure_overhead
from pipeplan.profiler.prepared_layers import DuplicateFinder
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.loss import loss_text
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.models.sleeping_stage import CacheEviction
from pipeplan_launch.runtime.backward_passes import SplitBackward
from pipeplan_launch.tracing.layers import LOSS_LAYER

LONG_PASS_S = 1.0
"""Passes that take at least this time are long. One long pass is enough to warm up. After a long pass the caches hold
nothing useful, so the whole model need not run after every pass over the layers."""
TURN_S = 0.2
"""Length of a turn, in seconds. Passes alone and under load take turns, so that both see the same machine speed."""
MOST_EVICTING_BYTES = 1 << 25
"""Most bytes that are read and written to evict the caches before a pass. More bytes have no effect."""
SPLIT_PASSES = 5
"""Number of times that the backward pass is also run in two parts."""
WHOLE_EVERY = 3
"""If passes are long, the whole model runs in the first `WHOLE_EVERY` passes, then once in `WHOLE_EVERY`."""


class Passes:
    """Runs passes over the model, layer by layer and as a whole."""

    def __init__(self, job: Job, run: LayerRun, clock: Clock, progress: Progress) -> None:
        self.job, self.run, self.clock, self.progress = job, run, clock, progress
        state_ratio = optimizer_state(job).ratio
        self._parameters = tuple(run.traced.parameters_by_name().values())
        trained = sum(parameter.nbytes for parameter in self._parameters if parameter.requires_grad)
        updated = int(trained * (2 + state_ratio))
        self.eviction = CacheEviction(min(updated, MOST_EVICTING_BYTES), run.device)
        """Replaces the update before a pass, which in training reads weights, gradients and the optimiser's state."""
        self.overhead = Overhead(0.0, 0.0)
        self.warmed = 0
        """Number of passes that warmed up, layer by layer and as a whole."""
        self._long = False

    def inspect(self, ref: str) -> dict[str, int]:
        """Run one full pass that checks for NaN and finds duplicate layers.

        Returns the bytes that each layer saves for backward. Raises `InputError` if the model cannot be run or trained.
        """
        self.progress(0, 0, "first pass")
        # The data of a minibatch counts, because a stage holds it for every minibatch in flight.
        traced = self.run.traced
        saved = SavedBytes([*traced.parameters_by_name().values(), *traced.buffers_by_name().values()])
        modules = {layer.name: layer.module for layer in self.run.traced.layers}
        self.run.watcher = observer = DuplicateFinder(self.run.layers)
        entered: list[str] = []

        def watch(layer: str) -> AbstractContextManager[None]:
            entered.append(layer)
            return saved.watch(layer)

        try:
            self.run.forward(
                self.clock.measure, watch, lambda layer, made: _check_outputs(ref, layer, modules[layer], made)
            )
        except (LaunchError, InputError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            part = f"{loss_text(self.run.loss)} failed: " if entered[-1:] == [LOSS_LAYER] else ""
            why = f"{part}{describe_error(error)}"
            raise InputError(f"{ref!r} cannot be run on a microbatch of its data: {why}") from error
        self.run.backward(self.clock.measure)
        self.run.watcher = None
        self._clear()
        self.run.alike = observer.classes()
        return dict(saved.by_layer)

    def warm_up(self, passes: int) -> None:
        """Run passes that are not measured, at most `passes`, then measure the time of an empty layer."""
        took_s = 0.0
        while self.warmed == 0 or (self.warmed < passes and took_s < LONG_PASS_S):
            self.progress(0, 0, "warming up")
            start = time.perf_counter()
            self.run_both(None)
            took_s = time.perf_counter() - start
            self.warmed += 1
        self._long = took_s >= LONG_PASS_S
        self.progress(0, 0, "calibrating")
        passes = max(1, min(20, int(LONG_PASS_S / 2 / took_s)))
        self.overhead = measure_overhead(self.run, self.clock, self.run.batch.inputs[0].device, passes)

    def measure(
        self, repeats: int | None, aim: Aim = THOROUGH, load: BusyCores | None = None
    ) -> tuple[Samples, Samples | None]:
        """Run `repeats` measured passes. If it is None, run passes until the aim is reached or its time is used up.

        With a `load`, further passes run under it, and the second result has their times. Both kinds of passes take
        turns until there are enough of each, so that a change of the machine's speed affects both.
        """
        alone = Series(Samples(self.run.weights), aim, repeats)
        loaded = None if load is None else Series(Samples(self.run.weights), aim, repeats)
        while not alone.enough or not (loaded is None or loaded.enough):
            if not alone.full:
                self._take_turn(alone, "measuring")
            if load is not None and loaded is not None and not loaded.full:
                load.start()
                if loaded.samples.passes == 0:
                    self.run_both(None)
                self._take_turn(loaded, f"measuring with {load.processes} processes")
                load.stop()
        self.progress(alone.samples.passes, alone.samples.passes, "done")
        return alone.samples, None if loaded is None else loaded.samples

    def _take_turn(self, series: Series, what: str) -> None:
        """Run passes of one kind until there are enough, or their turn is over."""
        began = time.perf_counter()
        before_s = series.spent_s
        while True:
            self.progress(series.samples.passes, series.repeats or 0, what)
            self.run_both(series.samples)
            taken_s = time.perf_counter() - began
            series.spent_s = before_s + taken_s
            if series.full or taken_s >= TURN_S:
                return

    def workspaces(self) -> dict[str, int]:
        """Run one more pass, for the workspace of each layer in bytes."""
        workspaces = measure_workspaces(self.run, self.run.device)
        self._clear()
        return workspaces

    def steps(self, own: Mapping[str, Sequence[str]], load: BusyCores | None = None) -> StepCost:
        """Measure whole training steps after all other passes; if there is a `load`, also under it.

        `own`: the parameters that count for each layer.
        """
        self.progress(0, 0, "the optimiser's step")
        cost = measure_steps(
            self.job,
            self.run.minibatch,
            own,
            self.clock,
            self.whole,
            self.run.batch.inputs,
            load,
            self.run.traced.loss_state,
        )
        self.progress(1, 1, "done")
        return cost

    def run_both(self, samples: Samples | None) -> None:
        """Run the layers, then the whole model, in turn, so that a machine that becomes slower affects both times."""
        done = samples.passes if samples is not None else 0
        self.eviction.run()
        forward = self.run.forward(self.clock.measure)
        backward = self.run.backward(self.clock.measure)
        self._clear()
        whole: tuple[Callable[[], float], ...] = ()
        if not self._long or done < WHOLE_EVERY or done % WHOLE_EVERY == 0:
            self.eviction.run()
            whole = self.whole()
        self._clear()
        self.clock.settle()
        if samples is not None and whole and len(samples.whole_split) < SPLIT_PASSES:
            samples.whole_split += self._split()
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

    def _split(self) -> list[float]:
        """Seconds of a backward pass in two parts: down to the first trained parameter, then all other weights.

        Empty for a model whose backward pass cannot be divided.
        """
        trained = [one for one in self._parameters if one.requires_grad]
        batch = self.run.batch
        self.eviction.run()
        with self.run.precision():
            loss = self.run.loss(batch.call(self.job.model), batch.target)

        def backward() -> None:
            split = SplitBackward([loss], trained[:1], trained[1:])
            split.inputs([torch.ones_like(loss)])
            split.weights()

        try:
            seconds = self.clock.measure(backward)
        except RuntimeError:  # such as torch.utils.checkpoint with use_reentrant
            return []
        finally:
            self._clear()
        self.clock.settle()
        return [seconds()]

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _check_outputs(ref: str, layer: str, module: str, outputs: Sequence[Tensor]) -> None:
    """Raise `InputError` for NaN in the outputs of a layer, and for a loss that cannot be used for training."""
    if layer == LOSS_LAYER:
        _check_loss(ref, outputs[0])
    elif any(bool(tensor.isnan().any()) for tensor in outputs if tensor.is_floating_point()):
        where = f" (in the module {module!r})" if module and module != layer else ""
        raise InputError(
            f"layer {layer!r}{where} of {ref!r} produces NaN on a microbatch of its data: "
            "check the inputs and the initial weights"
        )


def training_loss(job: Job, batch: Batch) -> Callable[[Any, Any], Tensor]:
    """The job's loss, or `sum_of_outputs` if the job has no loss or the batch no target."""
    return job.loss if job.loss is not None and batch.target is not None else sum_of_outputs


def sum_of_outputs(output: Any, target: Any) -> Tensor:
    """Sum of all outputs that have a gradient. A backward pass starts from this scalar if there is no loss.

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
        raise InputError(f"the loss of {ref!r} is {loss.item()} on a microbatch of its data: check data and weights")
    if not loss.requires_grad:
        raise InputError(f"the loss of {ref!r} does not depend on any parameter that can be trained")
