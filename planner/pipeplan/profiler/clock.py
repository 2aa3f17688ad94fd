"""Time intervals on a device, and what to say of repeated ones.

What running a layer as a function of its own costs besides the layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from pipeplan.profiler.layer_inputs import RunLayer
from pipeplan.profiler.layer_run import LayerRun, Measure
from pipeplan_launch.tracing.subgraph import Subgraph
from pipeplan_launch.tracing.trace import TensorSpec


class Clock(Protocol):
    """Measures calls. On an accelerator a time is known only after `settle`, so that `measure` returns a handle."""

    how: str
    """What is measured, as part of a sentence."""

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run `call`; the result gives its time in seconds, once `settle` has been called."""

    def settle(self) -> None:
        """Wait until all that was measured has run."""


class CPUClock:
    """The time that this thread computes (one thread), else wall-clock time.

    With one thread both passes run on the calling thread; its own time leaves out what other processes take. What they
    slow it by, through caches, memory and the clock, it has in it; waiting for a core it has not, also where the others
    belong to what is measured (`processes`): for that the planner knows how many cores a cluster's workers share.
    """

    def __init__(self, threads: int, processes: int = 1) -> None:
        own = threads == 1
        self._now = time.thread_time if own else time.perf_counter
        self.how = "CPU time of the one computing thread" if own else f"wall-clock time with {counted(threads)}"
        if processes > 1:
            self.how += f" in each of {processes} processes at the same time"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run the call; its time is known at once."""
        start = self._now()
        call()
        elapsed = self._now() - start
        return lambda: elapsed

    def settle(self) -> None:
        """Nothing runs behind the caller's back."""


def counted(threads: int) -> str:
    """`1 thread`, `2 threads`."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


class CUDAClock:
    """Device events around the kernels of a call."""

    how = "device events"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Record events around what the call enqueues."""
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


def median(times: Sequence[float]) -> float:
    """The median, in the unit of the times."""
    return statistics.median(times)


def spread(times: Sequence[float]) -> float:
    """The interquartile range, in the unit of the times; 0 for a single one."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True)
class Overhead:
    """Seconds for one call of a layer that does nothing; a stage pays them once and not once a layer."""

    forward_s: float
    backward_s: float


def measure_overhead(run: LayerRun, clock: Clock, device: torch.device, passes: int) -> Overhead:
    """Run a layer that returns what it is given after every layer of the model, the way that layers are measured.

    Among the layers, and not in a loop of its own: there it would find all caches warm, and take a quarter of the time.
    """
    empty, given = empty_layer(), torch.zeros(1, device=device)
    forward: list[Callable[[], float]] = []
    backward: list[Callable[[], float]] = []

    def back() -> None:
        run.alone_forward(empty, [given], unmeasured)
        backward.append(run.alone_backward(empty, [given], clock.measure))

    for _ in range(passes):
        run.forward(
            _followed_by(clock.measure, lambda: forward.append(run.alone_forward(empty, [given], clock.measure)))
        )
        run.backward(_followed_by(clock.measure, back))
    clock.settle()
    return Overhead(median([taken() for taken in forward]), median([taken() for taken in backward]))


def _followed_by(measure: Measure, then: Callable[[], None]) -> Measure:
    def both(call: Callable[[], None]) -> Callable[[], float]:
        taken = measure(call)
        then()
        return taken

    return both


def unmeasured(call: Callable[[], None]) -> Callable[[], float]:
    """Just run it."""
    call()
    return lambda: 0.0


def empty_layer() -> RunLayer:
    """One that passes on the one tensor that it is given, and its gradient."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    graph.placeholder("batch")
    graph.output((graph.call_function(torch.ops.aten.alias.default, (given,)),))
    name = "(empty)"
    receives = TensorSpec(f"{name} given", "", (name,), torch.float32, requires_grad=True, dimensions=(1,))
    makes = TensorSpec(f"{name} made", name, (f"after {name}",), torch.float32, requires_grad=True, dimensions=(1,))
    segment = Subgraph((), (), fx.GraphModule({}, graph))
    return RunLayer(name, segment, (), (), (receives,), (makes,), writes_in_place=False)
