"""What running a layer as a function of its own costs besides the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from pipeplan.profiler.clock import Clock, median
from pipeplan.profiler.layer_run import LayerRun, Measure
from pipeplan.profiler.prepared import RunLayer
from pipeplan_launch.segment import Segment
from pipeplan_launch.trace import TensorSpec


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
    segment = Segment((), (), fx.GraphModule({}, graph))
    return RunLayer(name, segment, (), (), (receives,), (makes,), writes_in_place=False)
