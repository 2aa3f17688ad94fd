"""Functions on the tensors in nested structures, such as a batch or a model's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the tensors in nested tuples, lists, dicts and other types that torch's pytree knows, such as
    a registered dataclass. Other values stay as they are.
    """
    return tree_map_only(Tensor, change, value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def bytes_of_tensors(value: Any) -> int:
    """Bytes of the tensors in a nested structure."""
    return sum(leaf.nbytes for leaf in tensors_in(value))


def gradient_functions(value: Any) -> dict[Any, None]:
    """The autograd functions that a backward pass from the tensors in a nested structure reaches."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(value)]
    reached: dict[Any, None] = {}
    while waiting:
        function = waiting.pop()
        if function is not None and function not in reached:
            reached[function] = None
            waiting += [following for following, _ in function.next_functions]
    return reached


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this worker holds, in the same memory: the whole tensor unless FSDP2 has divided it."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
