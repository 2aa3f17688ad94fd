"""What running a layer as a function of its own costs besides the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from pipeplan.profiler.clock import Clock, median
from pipeplan.profiler.layer_run import LayerRun, Measure


@dataclass(frozen=True)
class Overhead:
    """Seconds for one call of a layer that does nothing; a stage pays them once and not once a layer."""

    forward_s: float
    backward_s: float


def measure_overhead(run: LayerRun, clock: Clock, device: torch.device, passes: int) -> Overhead:
    """Run a layer that returns what it is given after every layer of the model, the way that layers are measured.

    Among the layers, and not in a loop of its own: there it would find all caches warm, and take a quarter of the time.
    """
    empty = _EmptyLayer(device)
    forward: list[Callable[[], float]] = []
    backward: list[Callable[[], float]] = []
    for _ in range(passes):
        run.forward(_followed_by(clock.measure, empty.forward, forward))
        run.backward(_followed_by(clock.measure, empty.backward, backward))
    clock.settle()
    return Overhead(median([taken() for taken in forward]), median([taken() for taken in backward]))


def _followed_by(measure: Measure, second: Callable[[], None], times: list[Callable[[], float]]) -> Measure:
    def both(first: Callable[[], None]) -> Callable[[], float]:
        taken = measure(first)
        times.append(measure(second))
        return taken

    return both


class _EmptyLayer:
    def __init__(self, device: torch.device) -> None:
        graph = fx.Graph()
        graph.output((graph.call_function(torch.ops.aten.alias.default, (graph.placeholder("x"),)),))
        self._run = fx.GraphModule({}, graph)
        self._given = torch.zeros(1, device=device, requires_grad=True)
        self._gradient = torch.ones(1, device=device)
        self._made: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        self._made = self._run(self._given)

    def backward(self) -> None:
        torch.autograd.grad(self._made, [self._given], [self._gradient], retain_graph=True, allow_unused=True)
