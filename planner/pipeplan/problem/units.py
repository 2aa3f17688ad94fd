"""Units of a model (groups of layers that no cut separates), and the tensors between units."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InputError
from pipeplan.plan.schedules import VIRTUAL
from pipeplan.problem.between_cuts import SharedWeight, shared_weights
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import edges
from pipeplan.profile_data.profile import Profile
from pipeplan.util import graph
from pipeplan.util.text import did_you_mean


@dataclass(frozen=True)
class Unit:
    """Layers that no cut separates, with the sums of their costs for one minibatch on a device of speed 1."""

    layers: tuple[str, ...]
    """Names of the layers, in the order of the profile."""
    forward_s: float
    backward_s: float
    """Backward time including the optimiser's step; 0 in inference."""
    parameter_bytes: int
    buffer_bytes: int
    saved_bytes: float
    """Bytes kept from forward to backward, including the allocator's overhead; 0 in inference."""
    update_s: float = 0.0
    """The part of `backward_s` that is the optimiser's step, times `Options.update_share`."""
    workspace_bytes: int = 0
    """The largest workspace of the unit's layers in bytes, because layers run one after another; 0 in inference."""


@dataclass(frozen=True)
class Flow:
    """A tensor that one unit sends to others.

    The tensor crosses every cut with its producer inside and a consumer outside.
    """

    producer: int
    """Index of the unit that computes the tensor."""
    consumers: tuple[int, ...]
    """Indices of the units that read the tensor, in increasing order."""
    bytes: int
    gradient_bytes: int
    """Bytes of the tensor's gradient, which is sent backward; 0 in inference."""


@dataclass(frozen=True)
class FlowArrays:
    """The flows of a problem as arrays, for sums over all of them."""

    producer: NDArray[np.intp]
    consumers: NDArray[np.intp]
    """The consumers of all flows, one flow after another."""
    starts: NDArray[np.intp]
    """Index of the first consumer of each flow."""
    bytes: NDArray[np.float64]
    """(bytes forward, bytes backward), a row for each flow."""

    @classmethod
    def of(cls, flows: Sequence[Flow]) -> FlowArrays:
        """The arrays of some flows."""
        consumers = [unit for flow in flows for unit in flow.consumers]
        counts = [0, *(len(flow.consumers) for flow in flows)]
        return cls(
            producer=np.array([flow.producer for flow in flows], dtype=np.intp),
            consumers=np.array(consumers, dtype=np.intp),
            starts=np.cumsum(counts[:-1], dtype=np.intp),
            bytes=np.array([(flow.bytes, flow.gradient_bytes) for flow in flows], dtype=float).reshape(-1, 2),
        )

    def crossing(self, stage_of: NDArray[np.intp], stages: int) -> NDArray[np.float64]:
        """Bytes that cross the cut behind each stage, forward and backward; `stage_of` has the stage of each unit.

        A tensor counts once for each cut that it crosses.
        """
        crossing = np.zeros((stages + 1, 2))
        if len(self.starts):
            # Sum up differences, so that the work for a tensor does not depend on the number of cuts that it crosses.
            first, last = stage_of[self.producer], np.maximum.reduceat(stage_of[self.consumers], self.starts)
            np.add.at(crossing, first, self.bytes)
            np.subtract.at(crossing, np.maximum(first, last), self.bytes)
        return np.cumsum(crossing[:-1], axis=0)


def units_and_flows(
    profile: Profile, options: Options
) -> tuple[tuple[Unit, ...], tuple[Flow, ...], tuple[SharedWeight, ...]]:
    """The units of a profile, the tensors between them, and the weights that they share.

    The result is cached for each combination of the options that it depends on."""
    arrows = user_groups(profile, options)
    key = "units and flows", tuple(arrows), options.inference, options.update_share
    if key not in profile.derived:
        groups = _contract(profile, arrows)
        unit_of = {name: index for index, group in enumerate(groups) for name in group}
        flows = tuple(_flows(profile, groups, options))
        profile.derived[key] = tuple(_units(profile, groups, options)), flows, shared_weights(profile, unit_of)
    units, flows, shared = profile.derived[key]
    return units, flows, shared


def _contract(profile: Profile, wanted: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """The groups of layers that become units, in topological order.

    `wanted` has the groups that the user's options join.

    The groups are the strong components of the graph after adding edges in both directions between the members of each
    given group. So a group also has all layers between its members.
    """
    arrows = edges(profile.tensors)
    for group in (*profile.together, *wanted):
        for first, second in itertools.pairwise(group):
            arrows += [(first, second), (second, first)]
    return graph.strong_components([layer.name for layer in profile.layers], arrows)


def user_groups(profile: Profile, options: Options) -> list[tuple[str, ...]]:
    """The groups of layers that the options keep in one stage.

    The groups come from `together` and `no_cut_after`. Unless the schedule is synchronous, layers that share weights
    are also groups.

    Raises an `InputError` if the options name a layer that the profile does not have.
    """
    names = [layer.name for layer in profile.layers]
    for name in itertools.chain(*options.together, options.no_cut_after, (layer for layer, _ in options.pins)):
        if name not in names:
            raise InputError(f"the profile has no layer {name!r}; {did_you_mean(name, names)}")
    uncut = [tensor for tensor in profile.tensors if tensor.producer in options.no_cut_after]
    # Workers with several stages do not exchange gradients of shared weights.
    apart = options.flushes and options.schedule not in VIRTUAL
    held = () if apart else (tie.layers for tie in profile.tied)
    return [*options.together, *((tensor.producer, *tensor.consumers) for tensor in uncut), *held]


def _units(profile: Profile, groups: list[list[str]], options: Options) -> Iterator[Unit]:
    """One unit for each group of layers. The layers of a unit are in the order of the profile."""
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    for group in groups:
        layers = [profile.layers[index] for index in sorted(position[name] for name in group)]
        update = sum(layer.update_s for layer in layers) * options.update_share
        yield Unit(
            layers=tuple(layer.name for layer in layers),
            forward_s=sum(layer.forward_s for layer in layers),
            backward_s=0.0 if options.inference else sum(layer.backward_s for layer in layers) + update,
            parameter_bytes=sum(layer.parameter_bytes for layer in layers),
            buffer_bytes=sum(layer.buffer_bytes for layer in layers),
            saved_bytes=0 if options.inference else sum(layer.saved_bytes for layer in layers),
            update_s=update,
            workspace_bytes=0 if options.inference else max(layer.workspace_bytes for layer in layers),
        )


def _flows(profile: Profile, groups: list[list[str]], options: Options) -> list[Flow]:
    unit_of = {name: index for index, group in enumerate(groups) for name in group}
    flows = []
    for tensor in profile.tensors:
        producer = unit_of[tensor.producer]
        consumers = tuple(sorted({unit_of[name] for name in tensor.consumers} - {producer}))
        if consumers:
            gradient = 0 if options.inference else tensor.gradient_bytes
            flows.append(Flow(producer, consumers, tensor.bytes, gradient))
    return flows
