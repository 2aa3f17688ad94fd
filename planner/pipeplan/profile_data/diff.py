"""Compares two profiles, layer by layer and in total. Layers of the same name are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from pipeplan.profile_data.layers import edges
from pipeplan.profile_data.profile import Profile
from pipeplan.util.typed import json_fields

SAME, DIFFERENT, UNKNOWN = "same", "different", "not known"
"""The results of comparing the hashes of two traced graphs."""


@dataclass(frozen=True)
class LayerCosts:
    """Summed costs of some layers of one profile, for one minibatch, or for one sample if minibatches differ."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    spread_s: float = 0.0
    """Spread of both passes, summed over the layers."""
    parameter_bytes: int = 0
    saved_bytes: float = 0
    output_bytes: float = 0
    loaded_s: float = 0.0
    """Time of both passes with all cores busy; 0 if it was not measured."""

    @property
    def total_s(self) -> float:
        """Forward plus backward time."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class LayerDiff:
    """The costs of a layer in both profiles; zero if a profile lacks the layer."""

    name: str
    first: LayerCosts
    second: LayerCosts
    beyond_spread: bool | None = None
    """Whether the times differ by more than both spreads together; None if no spreads were measured."""

    @property
    def change_s(self) -> float:
        """Time of the second profile minus time of the first."""
        return self.second.total_s - self.first.total_s


@dataclass(frozen=True)
class ProfileDiff:
    """The differences between two profiles, at a common minibatch size if there is one."""

    first: Profile
    second: Profile
    per_sample: bool
    """Whether figures are for one sample instead of one minibatch, because the minibatches differ."""
    graph: str
    """`SAME` or `DIFFERENT` by the hashes of the traced graphs; `UNKNOWN` if a profile was not traced."""
    same_structure: bool
    """Whether both profiles have the same layers, with the same edges between them."""
    layers: tuple[LayerDiff, ...]
    """The layers that both profiles have, by their effect on the total time, largest first."""
    only_first: tuple[LayerDiff, ...]
    only_second: tuple[LayerDiff, ...]
    totals: tuple[LayerCosts, LayerCosts]


def compare_profiles(first: Profile, second: Profile) -> ProfileDiff:
    """Compare two profiles at the largest minibatch size at which both were measured, otherwise per sample."""
    common = {size.minibatch for size in first.all_sizes} & {size.minibatch for size in second.all_sizes}
    if common and first.minibatch != second.minibatch:
        first, second = first.rescaled(max(common)), second.rescaled(max(common))
    per_sample = first.minibatch != second.minibatch
    costs, others = (_costs(profile, 1 / profile.minibatch if per_sample else 1.0) for profile in (first, second))
    spreads = all(any(layer.forward_spread_s for layer in profile.layers) for profile in (first, second))
    layers = []
    for name in costs.keys() & others.keys():
        one, other = costs[name], others[name]
        beyond = abs(other.total_s - one.total_s) > one.spread_s + other.spread_s if spreads else None
        layers.append(LayerDiff(name, one, other, beyond))
    graph = UNKNOWN
    if first.graph_hash and second.graph_hash:
        graph = SAME if first.graph_hash == second.graph_hash else DIFFERENT
    return ProfileDiff(
        first=first,
        second=second,
        per_sample=per_sample,
        graph=graph,
        same_structure=costs.keys() == others.keys() and set(edges(first.tensors)) == set(edges(second.tensors)),
        layers=tuple(sorted(layers, key=lambda layer: (-abs(layer.change_s), layer.name))),
        only_first=tuple(LayerDiff(name, costs[name], LayerCosts()) for name in costs if name not in others),
        only_second=tuple(LayerDiff(name, LayerCosts(), others[name]) for name in others if name not in costs),
        totals=(sum_costs(costs.values()), sum_costs(others.values())),
    )


def sum_costs(costs: Iterable[LayerCosts]) -> LayerCosts:
    """The sum of costs, field by field."""
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
        "layers": [json_fields(layer) | {"change_s": layer.change_s} for layer in diff.layers],
        "only_first": [{"name": layer.name} | json_fields(layer.first) for layer in diff.only_first],
        "only_second": [{"name": layer.name} | json_fields(layer.second) for layer in diff.only_second],
    }


def _costs(profile: Profile, scale: float) -> dict[str, LayerCosts]:
    """The costs of every layer. Costs that depend on the minibatch are multiplied by `scale`."""
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
