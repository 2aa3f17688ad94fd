"""Overhead that a stage has once, and not once for each layer: an empty call, and tensors that it computes again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import fx

from pipeplan.profiler.clock import Clock, repeated_s
from pipeplan.profiler.layer_run import LayerRun, Measure
from pipeplan.profiler.prepared_layers import PreparedLayer, state_tensors
from pipeplan.util.units import show_time
from pipeplan_launch.tracing.shared_copies import shared_copies
from pipeplan_launch.tracing.subgraph import Subgraph, cut_subgraph
from pipeplan_launch.tracing.trace import TensorSpec

COPIES_SHARE, COPIES_PASSES = 0.01, 5
"""Share of the forward pass above which a remark is made on copies, and the passes that are measured for it."""


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


def copies_seconds(run: LayerRun, clock: Clock) -> float:
    """Median time of computing everything that several layers read and each stage computes for itself; 0 if nothing."""
    copies = shared_copies(run.traced)
    if not copies.tensors:
        return 0.0
    made = [spec.name for spec in copies.tensors]
    segment = cut_subgraph(run.traced, [], [], made, device=run.device, copies=copies.node_of)
    state = state_tensors(run.traced, segment, run.device)
    data = [run.batch.inputs[index] for index in segment.inputs]

    def call() -> None:
        with run.precision():
            segment.run(*state, *data, run.minibatch)

    call()
    return repeated_s(clock, call, COPIES_PASSES, COPIES_PASSES, math.inf)


def copies_remarks(copies_s: float, forward_s: float) -> list[str]:
    """At most one sentence, if stages take a noticeable time for what no layer of theirs is charged for."""
    if copies_s <= COPIES_SHARE * forward_s:
        return []
    said = f"masks, positions and the like take {show_time(copies_s)}, {copies_s / forward_s:.1%} of the forward pass"
    return [f"{said}: the first layers that read them are charged, and each later stage that reads them takes as long"]
