"""The repeated blocks of a model: the units in which FSDP2 gathers weights, and in which activations are recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.nested_tensors import map_tensors


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of one class in a ModuleList or Sequential, at least two; those with the most parameters' elements.

    [] if there are none. A block that shares a parameter with the rest of the model is left out, because only one unit
    can hold the parameter.
    """
    alike: dict[tuple[nn.Module, type], list[nn.Module]] = {}
    for one in model.modules():
        for child in one.children() if isinstance(one, nn.ModuleList | nn.Sequential) else ():
            alike.setdefault((one, type(child)), []).append(child)
    several = [members for members in alike.values() if len(members) > 1]
    largest = max(several, key=lambda members: sum(map(_elements, members)), default=[])
    counts = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return [block for block in largest if _elements(block) and not _shares(block, counts)]


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(block: nn.Module, counts: Mapping[int, int]) -> bool:
    """Whether a parameter of a block has further names outside of it."""
    own = Counter(id(one) for _, one in block.named_parameters(remove_duplicate=False))
    return any(counts[key] > count for key, count in own.items())


def recompute_blocks(model: nn.Module) -> None:
    """Have every repeated block keep only its inputs in training, and run forward again for its backward pass.

    A model without repeated blocks is one block.
    """
    for block in repeated_blocks(model) or [model]:
        _recompute(block)


@contextmanager
def recomputation_explained() -> Iterator[None]:
    """Context of a backward pass: raises `LaunchError` for a block whose second forward pass differs from its first."""
    try:
        yield
    except CheckpointError as error:
        raise LaunchError(
            "a repeated block of the model does other work when its forward pass runs a second time, such as one that "
            "fills a cache: solve with --no-recompute"
        ) from error


def return_own_memory(block: nn.Module) -> None:
    """Have a block return no views. FSDP2 puts hooks on its outputs, and a write into a view silently drops them."""
    forward = block.forward

    def copying_views(*arguments: Any, **named: Any) -> Any:
        return map_tensors(forward(*arguments, **named), lambda one: one.clone() if one._is_view() else one)

    block.forward = copying_views


def _recompute(block: nn.Module) -> None:
    forward = block.forward

    def keeping_inputs(*arguments: Any, **named: Any) -> Any:
        if not is_grad_enabled():
            return forward(*arguments, **named)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _buffers_replaced(_copied_buffers(block))

        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named)

    block.forward = keeping_inputs


Buffers = list[tuple[nn.Module, str, Tensor]]
"""(module, name of a buffer, tensor)."""


def _copied_buffers(block: nn.Module) -> Buffers:
    """Copies of a block's buffers, as the first forward pass finds them."""
    return [
        (module, name, buffer.clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@contextmanager
def _buffers_replaced(copies: Buffers) -> Iterator[None]:
    """Context in which a block has these buffers in place of its own, which the second forward pass must not write."""
    own = [(module, name, module._buffers[name]) for module, name, _ in copies]
    try:
        for module, name, copy in copies:
            module._buffers[name] = copy
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer
