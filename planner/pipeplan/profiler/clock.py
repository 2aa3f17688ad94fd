"""Clocks that time calls on a device, the median and spread of repeated times, and the overhead of timing a layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from pipeplan.profiler.layer_inputs import PreparedLayer
from pipeplan.profiler.layer_run import LayerRun, Measure
from pipeplan_launch.tracing.subgraph import Subgraph
from pipeplan_launch.tracing.trace import TensorSpec


class Clock(Protocol):
    """Times calls. On an accelerator a time is known only after `settle`, so `measure` returns a handle."""

    how: str
    """The kind of time that the clock takes, phrased as part of a sentence."""

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run `call`. The returned function gives its time in seconds once `settle` has been called."""

    def settle(self) -> None:
        """Wait until every measured call has finished on the device."""


class CPUClock:
    """CPU time of the calling thread if torch computes with one thread, else wall-clock time.

    With one thread both passes run on the calling thread, so its CPU time leaves out the time that other processes
    take. It includes the slowdown from shared caches, memory bandwidth and clock frequency, and excludes waiting for a
    core, even if the other processes take part in the measurement (`processes`). The planner accounts for such waits
    itself, because it knows how many cores a cluster's workers share.
    """

    def __init__(self, threads: int, processes: int = 1) -> None:
        own = threads == 1
        self._now = time.thread_time if own else time.perf_counter
        self.how = "CPU time of the one computing thread" if own else f"wall-clock time with {thread_count(threads)}"
        if processes > 1:
            self.how += f" in each of {processes} processes at the same time"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run the call. Its time is known at once."""
        start = self._now()
        call()
        elapsed = self._now() - start
        return lambda: elapsed

    def settle(self) -> None:
        """Do nothing: CPU calls have finished when they return."""


def thread_count(threads: int) -> str:
    """A number of threads in words: `1 thread`, `2 threads`."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


class CUDAClock:
    """Time between two CUDA events, recorded before and after the kernels of a call."""

    how = "device events"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Record events before and after the kernels that the call enqueues."""
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


def interquartile_range(times: Sequence[float]) -> float:
    """The interquartile range, in the unit of the times; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True)
class Overhead:
    """Seconds for one call of a layer that does nothing. A stage pays them once, not once for each layer."""

    forward_s: float
    backward_s: float


def measure_overhead(run: LayerRun, clock: Clock, device: torch.device, passes: int) -> Overhead:
    """Time an empty layer, which returns its input, after every layer of the model: medians over `passes` passes.

    The empty layer runs among the others because in a loop of its own it would find all caches warm, and take a quarter
    of the time.
    """
    empty, tensor = empty_layer(), torch.zeros(1, device=device)
    forward: list[Callable[[], float]] = []
    backward: list[Callable[[], float]] = []

    def run_empty_backward() -> None:
        run.alone_forward(empty, [tensor], unmeasured)
        backward.append(run.alone_backward(empty, [tensor], clock.measure))

    for _ in range(passes):
        run.forward(
            _followed_by(clock.measure, lambda: forward.append(run.alone_forward(empty, [tensor], clock.measure)))
        )
        run.backward(_followed_by(clock.measure, run_empty_backward))
    clock.settle()
    return Overhead(median([taken() for taken in forward]), median([taken() for taken in backward]))


def _followed_by(measure: Measure, then: Callable[[], None]) -> Measure:
    def measure_both(call: Callable[[], None]) -> Callable[[], float]:
        taken = measure(call)
        then()
        return taken

    return measure_both


def unmeasured(call: Callable[[], None]) -> Callable[[], float]:
    """Run the call without timing it."""
    call()
    return lambda: 0.0


def empty_layer() -> PreparedLayer:
    """A layer that passes on its only input, and that input's gradient, unchanged."""
    graph = fx.Graph()
    tensor = graph.placeholder("given")
    graph.placeholder("batch")
    graph.output((graph.call_function(torch.ops.aten.alias.default, (tensor,)),))
    name = "(empty)"
    receives = TensorSpec(f"{name} given", "", (name,), torch.float32, requires_grad=True, dimensions=(1,))
    makes = TensorSpec(f"{name} made", name, (f"after {name}",), torch.float32, requires_grad=True, dimensions=(1,))
    segment = Subgraph((), (), fx.GraphModule({}, graph))
    return PreparedLayer(name, segment, (), (), (receives,), (makes,), writes_in_place=False)
