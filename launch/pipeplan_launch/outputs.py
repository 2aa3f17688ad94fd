"""What a model returns, made known to torch.export: its own dataclasses, and objects that only the model needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_unflatten

CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.SymInt, torch.SymFloat, torch.SymBool)


@contextmanager
def plain_outputs(model: nn.Module) -> Iterator[dict[str, None]]:
    """Inside, the model returns None in place of objects that torch does not know; their classes are yielded by name.

    Dataclasses are made known instead, for good. Others, such as the caches of keys and values in Hugging Face models,
    hold what a generation goes on with, and the loss does not need.
    """
    left_out: dict[str, None] = {}
    hook = model.register_forward_hook(lambda _, given, value: plain(value, left_out))
    try:
        yield left_out
    finally:
        hook.remove()


def plain(value: Any, left_out: dict[str, None]) -> Any:
    """The value with None for every object that torch does not know."""
    register(value)
    leaves, spec = tree_flatten(value)
    unknown = [one for one in leaves if one is not None and not isinstance(one, (Tensor, *CONSTANTS))]
    if not unknown:
        return value
    left_out.update(dict.fromkeys(type(one).__name__ for one in unknown))
    strange = set(map(id, unknown))
    return tree_unflatten([None if id(one) in strange else one for one in leaves], spec)


def register(value: Any) -> None:
    """Make the dataclasses in a value known to torch: their fields then count as what a list holds."""
    while True:
        classes = {type(one) for one in tree_flatten(value)[0] if dataclasses.is_dataclass(one)} - set(SUPPORTED_NODES)
        if not classes:
            return
        for kind in classes:
            torch.export.register_dataclass(kind)
