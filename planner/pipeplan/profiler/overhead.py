"""What running a layer as a function of its own costs besides the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from pipeplan.profiler.clock import Clock, median

CALLS = 50


@dataclass(frozen=True)
class Overhead:
    """Seconds for one call of a layer that does nothing; a stage pays them once and not once a layer."""

    forward_s: float
    backward_s: float


def measure_overhead(clock: Clock, device: torch.device) -> Overhead:
    """Measure a layer that returns what it is given, the way that layers are measured."""
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.alias.default, (graph.placeholder("x"),)),))
    layer = fx.GraphModule({}, graph)
    given = torch.zeros(1, device=device, requires_grad=True)
    gradient = torch.ones(1, device=device)
    forward, backward = [], []
    results: list[torch.Tensor] = []

    def differentiate() -> None:
        torch.autograd.grad(results, [given], [gradient], allow_unused=True)

    for _ in range(CALLS):
        results.clear()
        forward.append(clock.measure(lambda: results.extend(layer(given))))
        backward.append(clock.measure(differentiate))
    clock.settle()
    return Overhead(median([taken() for taken in forward]), median([taken() for taken in backward]))
