"""Plans whose stages follow each other in the order of the model's forward(), and read from the stage before only."""

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
    """Where a plan cuts the order of the layers, stage by stage.

    Raises `InputError` where the stages are no parts of it, where a tensor passes over a stage, and where a boundary is
    none of `boundaries.splits`.
    """
    found: list[int] = []
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
        found.append(place)
    for place, following in itertools.pairwise(found):
        over = boundaries.crossing[place] & boundaries.crossing[following]
        if over:
            passed = found.index(following) + 1
            raise refused(to, plan, f"the tensor {min(over)!r} passes over stage {passed} to a later one")
    return found


def restrict(to: Target, boundaries: Boundaries, places: Sequence[int], options: Options) -> Options:
    """The options under which stages begin at some of these places only. Raises `InputError` where there are none."""
    if not boundaries.splits:
        raise InputError(
            f"{to.title} is told where to cut by modules, and the profile does not say which modules its layers are"
        )
    if not places:
        raise InputError(f"{to.title} cannot cut this model: where its modules begin, other layers' outputs pass over")
    names = [layer.name for layer in boundaries.profile.layers]
    groups = (tuple(names[first:stop]) for first, stop in itertools.pairwise([0, *places, len(names)]))
    return replace(options, together=(*options.together, *(group for group in groups if len(group) > 1)))


def neighbourly(boundaries: Boundaries, options: Options) -> list[int]:
    """Places that can all be cut at once: every tensor is read by the stage that makes it, or by the next one.

    A tensor crosses at most one of them, and what reads no layer stands before the first, as it may read the model's
    inputs, which only the first stage is given. Where places exclude each other, those that one tensor crosses are
    taken, and then those that the fewest bytes cross: better ones may be left out. Two stages have one boundary, so
    that all places will do.
    """
    entering = boundaries.entering
    open_to_all = [place for place in boundaries.splits if place > entering and boundaries.crossing[place]]
    if 2 in (options.stages, options.max_stages):
        return open_to_all
    size = {tensor.name: tensor.bytes + tensor.gradient_bytes for tensor in boundaries.profile.tensors}
    taken: set[str] = set()
    found = []

    def cost(place: int) -> tuple[bool, int]:
        names = boundaries.crossing[place]
        return len(names) > 1, sum(map(size.__getitem__, names))

    for place in sorted(open_to_all, key=cost):
        if not boundaries.crossing[place] & taken:
            taken |= boundaries.crossing[place]
            found.append(place)
    return sorted(found)
