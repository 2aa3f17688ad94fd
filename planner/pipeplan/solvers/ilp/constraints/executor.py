"""Constraint (25) of the integer program: the executor's own work. `integer_program` has the notation."""

from __future__ import annotations

from pipeplan.solvers.ilp.constraints.placement_model import PlacementModel
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.solvers.ilp.facts.placements import Placement
from pipeplan.solvers.ilp.milp.linear_program import THOUSANDTHS, Term, Variable


def executor_work(model: PlacementModel) -> dict[Place, Variable]:
    """Add (25). Returns x by place, in thousandths of U on the fastest device; nothing where nothing is charged."""
    if not model.problem.cluster.executor:
        return {}
    return {place: _at_place(model, place) for place in model.at}


def _at_place(model: PlacementModel, place: Place) -> Variable:
    work = model.program.number(f"x_{place[0]}_{place[1]}")
    problem, start = model.problem, place[0]
    behind = [(used, 1.0) for placement, used in _used_at(model, place) if not model.placements.final(placement)]
    before = [*model.selected(place), *([(model.opening[start], -1.0)] if start in model.opening else [])]
    terms: list[Term] = []
    each = _scaled(model, passes=1), _scaled(model, boundaries=1)
    for amount, when in ((each[0], model.selected(place)), (each[1], before), (each[1], behind)):
        terms += [(variable, amount * factor) for variable, factor in when]
    # Bytes count only where a stage is, and copies only where another stage is behind it.
    sizes = [tensor.sent + tensor.returned for tensor in model.layers.tensors]
    cuts = [cut for cut in (start - 1, sum(place) - 1) if 0 <= cut < model.workers - 1]
    crossing = [
        (model.crossing[number, cut], _scaled(model, size=size))
        for cut in cuts
        for number, size in enumerate(sizes)
        if size
    ]
    most = sum(factor for _, factor in crossing)
    copied = _scaled(model, copied=model.total * problem.copied_share)
    for reading, slack in _reading(model, place):
        model.program.at_most([*terms, *reading, (work, -1.0)], slack)
        present = [*terms, *reading, *crossing, *model.selected(place, most)]
        model.program.at_most([*present, (work, -1.0)], most + slack)
        if copied:
            last = [(used, -copied) for placement, used in _used_at(model, place) if model.placements.final(placement)]
            weights = [(model.parameters[place], copied / THOUSANDTHS), *last]
            model.program.at_most([*present, *weights, (work, -1.0)], most + slack)
    return work


def _reading(model: PlacementModel, place: Place) -> list[tuple[list[Term], float]]:
    """Terms that add the reading of samples at the first and at the last stage, each with the bound that goes with it.

    A stage that is both reads once, so these are two constraints.
    """
    each = _scaled(model, samples=1)
    if not each:
        return [([], 0.0)]
    last = [(used, each) for placement, used in _used_at(model, place) if model.placements.final(placement)]
    if place[0] not in model.opening:
        return [(last, 0.0)]
    return [([(model.opening[place[0]], each), *model.selected(place, each)], each), (last, 0.0)]


def _used_at(model: PlacementModel, place: Place) -> list[tuple[Placement, Variable]]:
    return [(one, used) for one, used in model.used.items() if (one.start, one.replicas) == place]


def _scaled(
    model: PlacementModel,
    passes: int = 0,
    boundaries: int = 0,
    size: float = 0.0,
    copied: float = 0.0,
    samples: int = 0,
) -> float:
    """A part of the executor's work, in thousandths of U on the fastest device."""
    costs, several = model.problem.executor_costs, model.problem.passes
    seconds = passes * (several * costs.pass_s + model.problem.options.update_share * costs.step_s)
    seconds += boundaries * several * costs.message_s
    seconds += samples * costs.samples_s + size * costs.message_byte_s + copied * costs.version_byte_s
    return THOUSANDTHS * seconds / model.unit_s / model.fastest
