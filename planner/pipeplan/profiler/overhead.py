"""The time of an empty layer. A stage has this overhead only once, however many layers it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import fx

from pipeplan.profiler.clock import Clock
from pipeplan.profiler.layer_run import LayerRun, Measure
from pipeplan.profiler.prepared_layers import PreparedLayer
from pipeplan_launch.tracing.subgraph import Subgraph
from pipeplan_launch.tracing.trace import TensorSpec


@dataclass(frozen=True)
class Overhead:
    """Seconds for one call of a layer that does nothing."""

    forward_s: float
    backward_s: float


def measure_overhead(run: LayerRun, clock: Clock, device: torch.device, passes: int) -> Overhead:
    """Time an empty layer, which returns its input, after every layer of the model: medians over `passes` passes.

    The empty layer runs between the other layers. In a separate loop all caches would be warm, and the measured time
    would be a quarter.
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
