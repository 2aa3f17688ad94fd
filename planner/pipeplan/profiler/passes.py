"""Passes over a model: one that inspects, some to warm up, and the measured ones, by layers and whole in turn.

Measured times, whether there are enough of them, and what to say of their spread and drift.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.profiler.clock import Clock, Overhead, measure_overhead, median, spread
from pipeplan.profiler.concurrent import Company
from pipeplan.profiler.duplicate_layers import Observer
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import SavedBytes, measure_workspaces
from pipeplan.profiler.optimizer_step import StepCost, measure_steps
from pipeplan.profiler.options import Progress
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.tracing.layers import LOSS_LAYER

TOTAL_BOUND = 0.01
"""Passes go on until the standard error of the median total is below this share of it …"""
LAYER_BOUND = 0.03
"""… and that of each layer that counts below this share of the layer's time."""
THAT_COUNT = 0.9
"""The layers that count: the longest ones, which together make up this share of the time."""
LEAST = 5
"""Passes before a spread is judged."""
DRIFT_BOUND = 0.05
"""A change of the total between the first and the last third of the passes that is reported."""
SURE = 4.0
"""A drift is one only if it is this many standard errors large."""


@dataclass
class Samples:
    """Times in seconds, one for each pass; of the layers that were run."""

    weights: Mapping[str, int] = field(default_factory=dict)
    """How many layers a layer stands for; 1 where it is not in here."""
    forward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole_forward: list[float] = field(default_factory=list)
    whole_backward: list[float] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """How many there were."""
        return len(next(iter(self.forward.values()), []))

    def totals(self, of: Mapping[str, Sequence[float]]) -> list[float]:
        """For each pass the sum over all layers of the model."""
        weighted = ([self.weights.get(name, 1) * one for one in times] for name, times in of.items())
        return [sum(one) for one in zip(*weighted, strict=True)]

    def by_layer(self) -> dict[str, list[float]]:
        """Forward and backward together, for each layer that was run."""
        return {
            name: [a + b for a, b in zip(times, self.backward[name], strict=True)]
            for name, times in self.forward.items()
        }


def standard_error(times: Sequence[float]) -> float:
    """Of the median, as a share of it: 1.2533 σ / √n, with the σ of a normal distribution of this quartile range."""
    middle = median(times)
    if middle <= 0.0 or len(times) < 2:
        return 0.0 if len(times) > 1 else math.inf
    return 1.2533 * spread(times) / 1.349 / math.sqrt(len(times)) / middle


def uncertainty(samples: Samples) -> tuple[float, float, str]:
    """The standard error of the total, the largest of a layer that counts, and that layer's name."""
    by_layer = samples.by_layer()
    total = standard_error(samples.totals(by_layer))
    cost = {name: median(times) * samples.weights.get(name, 1) for name, times in by_layer.items()}
    left, worst, which = THAT_COUNT * sum(cost.values()), 0.0, ""
    for name in sorted(cost, key=lambda one: -cost[one]):
        if left <= 0.0:
            break
        left -= cost[name]
        error = standard_error(by_layer[name])
        if error >= worst:
            worst, which = error, name
    return total, worst, which


def settled(samples: Samples) -> bool:
    """Whether the spread is small enough to stop."""
    if samples.passes < LEAST:
        return False
    total, worst, _ = uncertainty(samples)
    return total <= TOTAL_BOUND and worst <= LAYER_BOUND


def drift(totals: Sequence[float]) -> float | None:
    """By which share the totals changed from the first third of the passes to the last; None where chance explains it.

    Medians of thirds, so that single passes that something disturbed do not matter.
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
    return change / start if abs(change) > max(DRIFT_BOUND * start, SURE * chance) else None


def notes_on(samples: Samples) -> tuple[str, ...]:
    """Sentences about what a reader of these times should know."""
    found = []
    totals = samples.totals(samples.by_layer())
    changed = drift(totals)
    if changed is not None:
        what = "slower" if changed > 0 else "faster"
        found.append(
            f"the machine became {abs(changed):.0%} {what} while it measured (the last third of {len(totals)} passes "
            "against the first): heat, a changing clock or other load; measure again when it is quiet"
        )
    total, worst, which = uncertainty(samples)
    if samples.passes >= 2 and (total > TOTAL_BOUND or worst > LAYER_BOUND):
        found.append(
            f"the spread is larger than aimed at: after {samples.passes} passes the total is known to "
            f"{total:.1%} and {which} to {worst:.1%} (aim: {TOTAL_BOUND:.0%} and {LAYER_BOUND:.0%}, standard error)"
        )
    return tuple(found)


BUDGET_S = 25.0
"""What the repeats may take, unless their number is given: at least 3 of them run."""
FEWEST, MOST = 3, 200
"""Of the measured passes, unless their number is given."""
LEAST_S = 1.0
"""And they go on for so long, to see whether the machine's speed changes."""
LONG_S = 1.0
"""A pass of this length warms up all that there is: no second one. And it leaves nothing in any cache for the next one,
so that the whole model need not run after every pass over the layers."""
WHOLE_EVERY = 3
"""Then it runs after the first passes, as many as this, and later after every one in so many."""


class Passes:
    """Runs passes over the model, layer by layer and whole."""

    def __init__(self, job: Job, run: LayerRun, clock: Clock, progress: Progress, company: Company) -> None:
        self.job, self.run, self.clock, self.progress, self.company = job, run, clock, progress, company
        self.overhead = Overhead(0.0, 0.0)
        self.warmed = 0
        """Passes that did not count, by layers and whole."""
        self._long = False

    def inspect(self, ref: str, *, measure_all: bool = False) -> dict[str, int]:
        """One full pass that looks for NaN, counts what is saved for backward, and finds layers that are alike."""
        self.progress(0, 0, "first pass")
        model = self.job.model
        saved = SavedBytes([*model.parameters(), *model.buffers(), *self.run.batch.inputs])
        modules = {layer.name: layer.module for layer in self.run.traced.layers}
        self.run.watcher = observer = Observer(self.run)
        try:
            self.run.forward(
                self.clock.measure, saved.watch, lambda layer, made: _look(ref, layer, modules[layer], made)
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
        """Passes that do not count, and what an empty layer takes."""
        took_s = 0.0
        while self.warmed == 0 or (self.warmed < passes and took_s < LONG_S):
            self.progress(0, 0, "warming up")
            start = time.perf_counter()
            self._both(None)
            took_s = time.perf_counter() - start
            self.warmed += 1
        self._long = took_s >= LONG_S
        self.progress(0, 0, "calibrating")
        passes = max(1, min(20, int(LONG_S / 2 / took_s)))
        self.overhead = measure_overhead(self.run, self.clock, self.run.batch.inputs[0].device, passes)

    def measure(self, repeats: int | None) -> Samples:
        """Measured passes: so many, or until their spread is small or the budget is spent."""
        samples = Samples(self.run.weights)
        self.company.start()
        start, enough = time.perf_counter(), False
        while not enough:
            self.progress(samples.passes, repeats or 0, "measuring")
            self._both(samples)
            done, spent_s = samples.passes, time.perf_counter() - start
            if repeats is not None:
                enough = done >= repeats
            else:
                spent = spent_s * (done + 1) / done > BUDGET_S
                enough = done >= FEWEST and (spent or done >= MOST or (spent_s >= LEAST_S and settled(samples)))
        self.company.finish(lambda: self._both(None))
        self.progress(samples.passes, samples.passes, "done")
        return samples

    def workspaces(self) -> dict[str, int]:
        """One more pass, for the bytes that layers need while they run."""
        found = measure_workspaces(self.run, self.run.device)
        self._clear()
        return found

    def steps(self, own: Mapping[str, Sequence[str]]) -> StepCost:
        """Whole training steps, after all other passes."""
        self.progress(0, 0, "the optimiser's step")
        self.company.start()
        found = measure_steps(self.job, self.run.minibatch, own, self.clock, self._once, self.run.batch.inputs)
        self.company.finish(self._once)
        self.progress(1, 1, "done")
        return found

    def _once(self) -> None:
        self.whole()

    def _both(self, samples: Samples | None) -> None:
        """The layers and the whole in turn, so that a machine that slows down slows both."""
        done = samples.passes if samples is not None else 0
        forward = self.run.forward(self.clock.measure)
        backward = self.run.backward(self.clock.measure)
        self._clear()
        whole = self.whole() if not self._long or done < WHOLE_EVERY or done % WHOLE_EVERY == 0 else ()
        self._clear()
        self.clock.settle()
        if samples is not None:
            for name, taken in forward.items():
                samples.forward[name].append(max(0.0, taken() - self.overhead.forward_s))
            for name, taken in backward.items():
                samples.backward[name].append(max(0.0, taken() - self.overhead.backward_s))
            if whole:
                samples.whole_forward.append(whole[0]())
                samples.whole_backward.append(whole[1]())

    def whole(self) -> tuple[Callable[[], float], Callable[[], float]]:
        """Forward and backward of the model as its author wrote it."""
        losses: list[Tensor] = []
        batch = self.run.batch

        def forward() -> None:
            with self.run.precision():
                losses.append(self.run.loss(batch.call(self.job.model), batch.target))

        taken = self.clock.measure(forward)
        return taken, self.clock.measure(lambda: losses.pop().backward())  # type: ignore[no-untyped-call]

    def _clear(self) -> None:
        self.job.model.zero_grad(set_to_none=True)


def _look(ref: str, layer: str, module: str, made: Sequence[Tensor]) -> None:
    """Raise an `InputError` for NaN in what a layer made, and for a loss that cannot be trained on."""
    if layer == LOSS_LAYER:
        _check_loss(ref, made[0])
    elif any(bool(tensor.isnan().any()) for tensor in made if tensor.is_floating_point()):
        where = f" (in the module {module!r})" if module and module != layer else ""
        raise InputError(
            f"layer {layer!r}{where} of {ref!r} produces NaN on a minibatch of its data: "
            "check the inputs and the initial weights"
        )


def _check_loss(ref: str, loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the loss of {ref!r} must be a single number, not {shape}")
    if not bool(torch.isfinite(loss).all()):
        raise InputError(f"the loss of {ref!r} is {loss.item()} on a minibatch of its data: check data and weights")
    if not loss.requires_grad:
        raise InputError(f"the loss of {ref!r} does not depend on any parameter that can be trained")
