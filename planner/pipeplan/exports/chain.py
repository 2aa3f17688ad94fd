"""Plans whose stages follow the order of the model's forward(), each reading tensors of the stage before only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from pipeplan.errors import InputError
from pipeplan.exports.boundaries import Boundaries
from pipeplan.exports.target import Target, refused
from pipeplan.plan import Plan
from pipeplan.problem import Options, Problem


def places_of(to: Target, boundaries: Boundaries, problem: Problem, plan: Plan) -> list[int]:
    """The places at which a plan cuts the order of the layers.

    Raises `InputError` if stages do not follow this order, if a boundary is not in `boundaries.splits`, and if a tensor
    skips a stage.
    """
    places: list[int] = []
    before: list[str] = []
    for number, stage in enumerate(plan.stages[:-1], start=1):
        before += stage.layers
        place = boundaries.place(before)
        if place is None:
            raise refused(to, plan, f"the layers of stages 1 to {number} are not the first that the model computes")
        if place not in boundaries.splits:
            left, right = (problem.profile.layers[one].name for one in (place - 1, place))
            reason = f"it cuts between {left!r} and {right!r}, where no module that is called once begins or ends"
            raise refused(to, plan, reason)
        places.append(place)
    for place, following in itertools.pairwise(places):
        skipping = boundaries.crossing[place] & boundaries.crossing[following]
        if skipping:
            passed = places.index(following) + 1
            raise refused(to, plan, f"the tensor {min(skipping)!r} skips stage {passed} on its way to a later one")
    return places


def restrict(to: Target, boundaries: Boundaries, places: Sequence[int], options: Options) -> Options:
    """The options under which stages begin at these places only. Raises `InputError` if there are no places."""
    if not boundaries.splits:
        raise InputError(f"{to.title} cuts at modules, and the profile does not name the modules of its layers")
    if not places:
        raise InputError(f"{to.title} cannot cut this model: a tensor would skip a stage wherever its modules begin")
    names = [layer.name for layer in boundaries.profile.layers]
    groups = (tuple(names[first:stop]) for first, stop in itertools.pairwise([0, *places, len(names)]))
    return replace(options, together=(*options.together, *(group for group in groups if len(group) > 1)))


def neighbourly(boundaries: Boundaries, options: Options) -> list[int]:
    """Places that can all be cut at once: every tensor is read only by the stage that makes it, or by the next one.

    So a tensor crosses at most one of the places. All places come after the last layer that reads no other layer,
    because such a layer may read the inputs of the model, which only the first stage gets. Where places exclude each
    other the choice is greedy: first those that a single tensor crosses, then by the bytes that cross. It can miss
    better ones. A plan of two stages has one boundary, so that all places are possible.
    """
    entering = boundaries.entering
    possible = [place for place in boundaries.splits if place > entering and boundaries.crossing[place]]
    if 2 in (options.stages, options.max_stages):
        return possible
    size = {tensor.name: tensor.bytes + tensor.gradient_bytes for tensor in boundaries.profile.tensors}
    taken: set[str] = set()
    chosen = []

    def cost(place: int) -> tuple[bool, int]:
        names = boundaries.crossing[place]
        return len(names) > 1, sum(map(size.__getitem__, names))

    for place in sorted(possible, key=cost):
        if not boundaries.crossing[place] & taken:
            taken |= boundaries.crossing[place]
            chosen.append(place)
    return sorted(chosen)
