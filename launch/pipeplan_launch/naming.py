"""From the tensors of a checkpoint to the state_dict of the user's own module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pipeplan_launch.trace import TracedModel


@dataclass(frozen=True)
class Naming:
    """How a model's state_dict is made of its parameters and buffers."""

    state_dict: Mapping[str, str] = field(default_factory=dict)
    """For every name in it, in its order, the first name of that parameter or buffer: tied ones have several."""
    unread: Mapping[str, Tensor] = field(default_factory=dict)
    """What is in it though no layer reads it, by first name; it never changes, and only the first stage keeps it."""


def naming_of(traced: TracedModel, *, keep_unread: bool) -> Naming:
    """The naming of a traced model. What a state_dict holds besides parameters and buffers is left out."""
    model = traced.model
    owned = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first = {id(tensor): traced.state_names[name] for name, tensor in owned}
    kept = {key: value for key, value in model.state_dict(keep_vars=True).items() if id(value) in first}
    read = {name for layer in traced.layers for name in (*layer.parameters, *layer.buffers)}
    unread = {first[id(value)]: value.detach() for value in kept.values() if first[id(value)] not in read}
    return Naming({key: first[id(value)] for key, value in kept.items()}, unread if keep_unread else {})
