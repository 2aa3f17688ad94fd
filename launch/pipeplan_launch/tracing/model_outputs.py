"""Model outputs that torch.export does not know: dataclasses are registered, other objects are left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

CONSTANT_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)


@contextmanager
def plain_outputs(model: nn.Module) -> Iterator[dict[str, None]]:
    """Context in which the model returns None in place of objects that torch does not know. Yields the names of their
    classes.

    Dataclasses are registered with torch instead, permanently. Other objects, such as the key-value caches of Hugging
    Face models, are needed to continue a generation, but not by the loss.
    """
    left_out: dict[str, None] = {}
    hook = model.register_forward_hook(lambda _module, _inputs, value: without_unknown_objects(value, left_out))
    try:
        yield left_out
    finally:
        hook.remove()


def without_unknown_objects(value: Any, left_out: dict[str, None]) -> Any:
    """The value with None in place of every object that torch does not know. The names of the objects' classes are
    added to `left_out`.
    """
    register_dataclasses(value)
    leaves, spec = tree_flatten(value)
    unknown = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, (Tensor, *CONSTANT_TYPES))]
    if not unknown:
        return value
    left_out.update(dict.fromkeys(type(leaf).__name__ for leaf in unknown))
    unknown_ids = set(map(id, unknown))
    return tree_unflatten([None if id(leaf) in unknown_ids else leaf for leaf in leaves], spec)


def register_dataclasses(value: Any) -> None:
    """Register the dataclasses in a value with torch's pytree, so that their fields count like members of a list."""
    while True:
        classes = {type(leaf) for leaf in tree_flatten(value)[0] if dataclasses.is_dataclass(leaf)} - set(
            SUPPORTED_NODES
        )
        if not classes:
            return
        for kind in classes:
            torch.export.register_dataclass(kind)
