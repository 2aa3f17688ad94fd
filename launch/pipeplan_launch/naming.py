"""Names in the state_dict of the user's own module, for the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from pipeplan_launch.trace import TracedModel


@dataclass(frozen=True)
class Naming:
    """The names of a model's state_dict."""

    state_dict: Mapping[str, str] = field(default_factory=dict)
    """For every name in the state_dict, in its order, the first name of that parameter or buffer: tied ones have
    several."""
    unread: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the state_dict that no layer reads, by first name. They never change, and only the first stage keeps
    them."""


def naming_of(traced: TracedModel, *, keep_unread: bool) -> Naming:
    """The naming of a traced model. Entries of the state_dict that are neither parameters nor buffers are left out."""
    model = traced.model
    owned = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first = {id(tensor): traced.state_names[name] for name, tensor in owned}
    kept = {key: value for key, value in model.state_dict(keep_vars=True).items() if id(value) in first}
    read = {name for layer in traced.layers for name in (*layer.parameters, *layer.buffers)}
    unread = {first[id(value)]: value.detach() for value in kept.values() if first[id(value)] not in read}
    return Naming({key: first[id(value)] for key, value in kept.items()}, unread if keep_unread else {})
