"""Compares two profiles, layer by layer and in total."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeplan.profile_data import Layer, Profile, edges
from pipeplan.profile_match import MODULE, Match, Matching, match

SAME, DIFFERENT, UNKNOWN = "same", "different", "not known"


@dataclass(frozen=True)
class Side:
    """What layers of one profile take, for one minibatch or one sample."""

    forward_s: float
    backward_s: float
    spread_s: float
    """Of both passes, summed over the layers."""
    parameter_bytes: int
    saved_bytes: float
    output_bytes: float

    @property
    def total_s(self) -> float:
        """Forward plus backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Row:
    """Layers that were matched."""

    first_names: tuple[str, ...]
    second_names: tuple[str, ...]
    by: str
    first: Side
    second: Side
    beyond_spread: bool | None
    """Whether the times differ by more than both spreads together; None where no spreads were measured."""

    @property
    def change_s(self) -> float:
        """By how much the second takes longer."""
        return self.second.total_s - self.first.total_s


@dataclass(frozen=True)
class Difference:
    """Two profiles beside each other."""

    first: Profile
    second: Profile
    per_sample: bool
    """Whether figures are for one sample, as the minibatches differ; else for one minibatch."""
    graph: str
    """`same` or `different` by the hashes of the traced graphs; `not known` where one was not traced."""
    same_structure: bool
    """Whether every layer has its match, one to one, and the same edges join them."""
    rows: tuple[Row, ...]
    """What changes the total most comes first."""
    only_first: tuple[tuple[str, Side], ...]
    only_second: tuple[tuple[str, Side], ...]
    totals: tuple[Side, Side]


def compare(first: Profile, second: Profile) -> Difference:
    """Compare at a minibatch size that both have, else per sample."""
    first, second = _at_one_size(first, second)
    per_sample = first.minibatch != second.minibatch
    found = match(first, second)
    both = (first, second)
    scales = [1 / one.minibatch if per_sample else 1.0 for one in both]
    made = [one.made_bytes() for one in both]
    spreads = all(any(layer.forward_spread_s for layer in one.layers) for one in both)

    def side(which: int, layers: Iterable[Layer]) -> Side:
        return _side(list(layers), made[which], scales[which])

    rows = [_row(one, side(0, one.first), side(1, one.second), spreads) for one in found.matches]
    return Difference(
        first=first,
        second=second,
        per_sample=per_sample,
        graph=_graph(first, second),
        same_structure=_same_structure(first, second, found),
        rows=tuple(sorted(rows, key=lambda row: -abs(row.change_s))),
        only_first=_alone(found.only_first, lambda layers: side(0, layers)),
        only_second=_alone(found.only_second, lambda layers: side(1, layers)),
        totals=(side(0, first.layers), side(1, second.layers)),
    )


def _alone(layers: Sequence[Layer], side: Any) -> tuple[tuple[str, Side], ...]:
    sides = [(layer.name, side([layer])) for layer in layers]
    return tuple(sorted(sides, key=lambda one: -one[1].total_s))


def _at_one_size(first: Profile, second: Profile) -> tuple[Profile, Profile]:
    """Both at the largest minibatch size that both were measured at, where there is one."""
    sizes = [{profile.minibatch, *(size.minibatch for size in profile.sizes)} for profile in (first, second)]
    common = sizes[0] & sizes[1]
    if not common or first.minibatch == second.minibatch:
        return first, second
    return first.rescaled(max(common)), second.rescaled(max(common))


def _side(layers: Sequence[Layer], made: dict[str, int], scale: float) -> Side:
    return Side(
        forward_s=sum(layer.forward_s for layer in layers) * scale,
        backward_s=sum(layer.backward_s for layer in layers) * scale,
        spread_s=sum(layer.forward_spread_s + layer.backward_spread_s for layer in layers) * scale,
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        saved_bytes=sum(layer.saved_bytes for layer in layers) * scale,
        output_bytes=sum(made[layer.name] for layer in layers) * scale,
    )


def _row(one: Match, first: Side, second: Side, spreads: bool) -> Row:
    names = tuple(layer.name for layer in one.first), tuple(layer.name for layer in one.second)
    row = Row(*names, one.by, first, second, None)
    if not spreads:
        return row
    return replace(row, beyond_spread=abs(row.change_s) > first.spread_s + second.spread_s)


def _graph(first: Profile, second: Profile) -> str:
    if not first.graph_hash or not second.graph_hash:
        return UNKNOWN
    return SAME if first.graph_hash == second.graph_hash else DIFFERENT


def _same_structure(first: Profile, second: Profile, found: Matching) -> bool:
    if found.only_first or found.only_second or any(one.by == MODULE for one in found.matches):
        return False
    name = {one.first[0].name: one.second[0].name for one in found.matches}
    mine = {(name[source], name[target]) for source, target in edges(first.tensors)}
    return mine == set(edges(second.tensors))


def document(found: Difference) -> dict[str, Any]:
    """All of it, for `--json`: seconds and bytes, for one sample where `per_sample` says so."""
    sides = (("first", found.first), ("second", found.second))
    return {
        **{
            which: {
                "digest": profile.digest(),
                "model": profile.model_name,
                "minibatch": profile.minibatch,
                "provenance": asdict(profile.provenance),
                "graph_hash": profile.graph_hash,
            }
            for which, profile in sides
        },
        "per_sample": found.per_sample,
        "graph": found.graph,
        "same_structure": found.same_structure,
        "total": {"first": asdict(found.totals[0]), "second": asdict(found.totals[1])},
        "layers": [asdict(row) | {"change_s": row.change_s} for row in found.rows],
        "only_first": [{"name": name} | asdict(side) for name, side in found.only_first],
        "only_second": [{"name": name} | asdict(side) for name, side in found.only_second],
    }
