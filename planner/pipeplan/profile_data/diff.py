"""Compares two profiles, layer by layer and in total."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from pipeplan.profile_data.layers import Layer, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.util.typed import json_fields

NAME, ORDER, WEIGHTS, MODULE = "name", "order and kind", "order and weights", "module"
"""The ways in which layers are matched."""
SAME, DIFFERENT, UNKNOWN = "same", "different", "not known"
"""The results of comparing the hashes of two traced graphs."""


Names = tuple[str, ...]
LayerMatch = tuple[Names, Names, str]
"""(layers of the first profile, layers of the second profile, way in which they were matched)."""


@dataclass(frozen=True)
class LayerCosts:
    """Summed costs of some layers of one profile, for one minibatch or, where minibatches differ, for one sample."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    spread_s: float = 0.0
    """Spread of both passes, summed over the layers."""
    parameter_bytes: int = 0
    saved_bytes: float = 0
    output_bytes: float = 0
    loaded_s: float = 0.0
    """Time of both passes with all cores busy; 0 where that was not measured."""

    @property
    def total_s(self) -> float:
        """Forward plus backward time."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class LayerDiff:
    """The costs of matched layers in both profiles. A layer without a match has empty names on the other side."""

    first_names: tuple[str, ...]
    second_names: tuple[str, ...]
    by: str
    """The way in which they were matched; empty where there is no match."""
    first: LayerCosts
    second: LayerCosts
    beyond_spread: bool | None = None
    """Whether the times differ by more than both spreads together; None where no spreads were measured."""

    @property
    def change_s(self) -> float:
        """Time of the second profile minus time of the first."""
        return self.second.total_s - self.first.total_s


@dataclass(frozen=True)
class ProfileDiff:
    """The differences between two profiles, at a minibatch size that both have if there is one."""

    first: Profile
    second: Profile
    per_sample: bool
    """Whether figures are for one sample, because the minibatches differ, and not for one minibatch."""
    graph: str
    """`SAME` or `DIFFERENT` by the hashes of the traced graphs; `UNKNOWN` where a profile was not traced."""
    same_structure: bool
    """Whether all layers match one to one, with the same edges between them."""
    layers: tuple[LayerDiff, ...]
    """All layers, matched or not, in the order of their effect on the total time, largest first."""
    totals: tuple[LayerCosts, LayerCosts]

    @property
    def matched(self) -> list[LayerDiff]:
        """The layers that both profiles have."""
        return [layer for layer in self.layers if layer.by]

    @property
    def unmatched(self) -> tuple[list[LayerDiff], list[LayerDiff]]:
        """The layers that only the first, and only the second profile has."""
        return (
            [layer for layer in self.layers if not layer.second_names],
            [layer for layer in self.layers if not layer.first_names],
        )


def compare_profiles(first: Profile, second: Profile) -> ProfileDiff:
    """Compare two profiles at the largest minibatch size that both were measured at, otherwise per sample."""
    common = {size.minibatch for size in first.all_sizes} & {size.minibatch for size in second.all_sizes}
    if common and first.minibatch != second.minibatch:
        first, second = first.rescaled(max(common)), second.rescaled(max(common))
    per_sample = first.minibatch != second.minibatch
    costs = [_costs(profile, 1 / profile.minibatch if per_sample else 1.0) for profile in (first, second)]
    spreads = all(any(layer.forward_spread_s for layer in profile.layers) for profile in (first, second))
    matches = match_layers(first, second)
    layers = []
    for names, other_names, by in matches:
        sums = sum_costs(costs[0][name] for name in names), sum_costs(costs[1][name] for name in other_names)
        layer = LayerDiff(names, other_names, by, *sums)
        if spreads and by:
            layer = replace(layer, beyond_spread=abs(layer.change_s) > sums[0].spread_s + sums[1].spread_s)
        layers.append(layer)
    graph = UNKNOWN
    if first.graph_hash and second.graph_hash:
        graph = SAME if first.graph_hash == second.graph_hash else DIFFERENT
    return ProfileDiff(
        first=first,
        second=second,
        per_sample=per_sample,
        graph=graph,
        same_structure=_same_structure(first, second, matches),
        layers=tuple(sorted(layers, key=lambda layer: -abs(layer.change_s))),
        totals=(sum_costs(costs[0].values()), sum_costs(costs[1].values())),
    )


def sum_costs(costs: Iterable[LayerCosts]) -> LayerCosts:
    """The sum of some costs, field by field."""
    return LayerCosts(*map(sum, zip(*map(astuple, costs), strict=True)))


def diff_document(diff: ProfileDiff) -> dict[str, Any]:
    """The comparison as JSON: seconds and bytes, for one sample where `per_sample` is true."""
    profiles = {
        side: {
            "digest": profile.digest(),
            "model": profile.model_name,
            "minibatch": profile.minibatch,
            "provenance": profile.provenance.to_json(),
            "graph_hash": profile.graph_hash,
        }
        for side, profile in (("first", diff.first), ("second", diff.second))
    }
    return profiles | {
        "per_sample": diff.per_sample,
        "graph": diff.graph,
        "same_structure": diff.same_structure,
        "total": {"first": json_fields(diff.totals[0]), "second": json_fields(diff.totals[1])},
        "layers": [json_fields(layer) | {"change_s": layer.change_s} for layer in diff.matched],
        "only_first": [{"name": layer.first_names[0]} | json_fields(layer.first) for layer in diff.unmatched[0]],
        "only_second": [{"name": layer.second_names[0]} | json_fields(layer.second) for layer in diff.unmatched[1]],
    }


def match_layers(first: Profile, second: Profile) -> list[LayerMatch]:
    """Match the layers of two profiles; a layer without a match is alone in a match with an empty `by`.

    Layers of the same name match unless their operations contradict it. The rest is aligned in order
    (`difflib.SequenceMatcher`), as other tools use other names: first by kind of operation and bytes of weights, then
    by the weights alone. Finally a layer is matched with all layers whose names begin with its own and a dot, which
    are the parts of that module. The result is in the order of the first profile.
    """
    left, right = list(first.layers), list(second.layers)
    matches: list[LayerMatch] = []
    methods: tuple[Callable[[Sequence[Layer], Sequence[Layer]], list[LayerMatch]], ...] = (
        _by_name,
        lambda left, right: _aligned(left, right, ORDER, lambda layer: (_kind(layer), layer.parameter_bytes)),
        _by_weights,
        _by_module,
        lambda left, right: [(parts, module, by) for module, parts, by in _by_module(right, left)],
    )
    for method in methods:
        matches += method(left, right)
        matched = {name for names, _, _ in matches for name in names}
        matched_of_second = {name for _, names, _ in matches for name in names}
        left = [layer for layer in left if layer.name not in matched]
        right = [layer for layer in right if layer.name not in matched_of_second]
    position = {layer.name: index for index, layer in enumerate(first.layers)}
    matches.sort(key=lambda match: position[match[0][0]])
    return [*matches, *(((layer.name,), (), "") for layer in left), *(((), (layer.name,), "") for layer in right)]


def _kind(layer: Layer) -> str:
    """The operation without its arguments, in a form that tools share: `Conv2d(3, 64, …)` and `conv2d` are the same."""
    return re.split(r"[^A-Za-z0-9_]", layer.op.strip(), maxsplit=1)[0].lower().strip("_")


def _by_name(left: Sequence[Layer], right: Sequence[Layer]) -> list[LayerMatch]:
    named = {layer.name: layer for layer in right}
    pairs = [(layer, named[layer.name]) for layer in left if layer.name in named]
    return [
        ((layer.name,), (other.name,), NAME)
        for layer, other in pairs
        if len({_kind(layer), _kind(other)} - {""}) < 2 or 0 < layer.parameter_bytes == other.parameter_bytes
    ]


def _by_weights(left: Sequence[Layer], right: Sequence[Layer]) -> list[LayerMatch]:
    left, right = ([layer for layer in layers if layer.parameter_bytes] for layers in (left, right))
    return _aligned(left, right, WEIGHTS, lambda layer: layer.parameter_bytes)


def _aligned(
    left: Sequence[Layer], right: Sequence[Layer], by: str, key: Callable[[Layer], Hashable]
) -> list[LayerMatch]:
    matcher = difflib.SequenceMatcher(None, [*map(key, left)], [*map(key, right)], autojunk=False)
    pairs = [(a + step, b + step) for a, b, size in matcher.get_matching_blocks() for step in range(size)]
    return [((left[a].name,), (right[b].name,), by) for a, b in pairs]


def _by_module(left: Sequence[Layer], right: Sequence[Layer]) -> list[LayerMatch]:
    free = [layer.name for layer in right]
    matches: list[LayerMatch] = []
    for module in left:
        if parts := tuple(name for name in free if name.startswith(f"{module.name}.")):
            matches.append(((module.name,), parts, MODULE))
            free = [name for name in free if name not in parts]
    return matches


def _costs(profile: Profile, scale: float) -> dict[str, LayerCosts]:
    """The costs of every layer, times `scale` where they depend on the minibatch."""
    output_bytes = profile.made_bytes()
    return {
        layer.name: LayerCosts(
            forward_s=layer.forward_s * scale,
            backward_s=layer.backward_s * scale,
            spread_s=(layer.forward_spread_s + layer.backward_spread_s) * scale,
            parameter_bytes=layer.parameter_bytes,
            saved_bytes=layer.saved_bytes * scale,
            output_bytes=output_bytes[layer.name] * scale,
            loaded_s=(layer.loaded_forward_s + layer.loaded_backward_s) * scale,
        )
        for layer in profile.layers
    }


def _same_structure(first: Profile, second: Profile, matches: Sequence[LayerMatch]) -> bool:
    if any(by in ("", MODULE) for _, _, by in matches):
        return False
    renamed = {name: other for (name,), (other,), _ in matches}
    return {(renamed[source], renamed[target]) for source, target in edges(first.tensors)} == set(edges(second.tensors))
