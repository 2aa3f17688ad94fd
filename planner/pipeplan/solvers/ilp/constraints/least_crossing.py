"""The fewest bytes that can cross a cut between two workers, by a small integer program for each.

The relaxation of the whole program spreads every layer over all workers, so that nothing crosses a cut. A lower bound
on the bytes behind each placement in use makes the loads of cards visible to it.
"""

from __future__ import annotations

import math

from pipeplan.solvers.ilp.constraints.placement_model import PlacementModel
from pipeplan.solvers.ilp.milp import backend
from pipeplan.solvers.ilp.milp.linear_program import NEGLIGIBLE, LinearProgram

WORTHWHILE = range(60, 10_000)
"""The products of layers and workers for which these bounds save more time than they take."""
# Relative slack for the rounding of the solver.
_SLACK = 1e-7
# Seconds for each of the programs, which usually take some milliseconds; then the solver's bound is used.
_PATIENCE_S = 0.5


def least_crossing(model: PlacementModel, sizes: list[float]) -> list[float]:
    """For every cut, a lower bound on the sum of these sizes, by tensor, over the tensors that cross it.

    It holds for a cut between two stages: both sides have layers, and the workers of each side can do its work within
    U. A bound is infinite where no such cut exists. Raises `KeyboardInterrupt` if Ctrl-C ended a program.
    """
    return [_least(model, sizes, cut) for cut in range(model.workers - 1)]


def _least(model: PlacementModel, sizes: list[float], cut: int) -> float:
    layers, program = model.layers, LinearProgram()
    total, largest = sum(block.work_s for block in layers.blocks), max(sizes, default=0.0)
    if largest <= 0:
        return 0.0
    before = [program.binary(f"x_{block}") for block in range(len(layers))]
    for source, target in layers.edges:
        program.at_most([(before[target], 1.0), (before[source], -1.0)])
    terms = []
    for number, (tensor, size) in enumerate(zip(layers.tensors, sizes, strict=True)):
        if size / largest > NEGLIGIBLE:
            crossing = program.number(f"b_{number}", 0, 1)
            terms.append((crossing, size / largest))
            for consumer in tensor.consumers:
                program.at_most([(before[tensor.producer], 1.0), (before[consumer], -1.0), (crossing, -1.0)])
    program.minimise(terms)
    program.at_least([(one, 1.0) for one in before], 1.0)
    program.at_most([(one, 1.0) for one in before], len(layers) - 1.0)
    work = [(one, block.work_s / total) for one, block in zip(before, layers.blocks, strict=True)]
    program.at_most(work, model.doable_s(0, cut + 1) / total + _SLACK)
    program.at_least(work, 1.0 - model.doable_s(cut + 1, model.workers) / total - _SLACK)
    outcome = backend.run(program.lp, "highs", _PATIENCE_S, 0.0)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return max(0.0, outcome.bound - _SLACK) * largest if math.isfinite(outcome.bound) else math.inf
