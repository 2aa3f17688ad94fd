"""Fused attention: one kernel forwards and one backwards.

It saves its inputs, its output and one number per query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from pipeplan.profiler.estimate.work import Work, arithmetic, cast, size_of

CAUSAL = 0.5
"""Share of the score matrix that a causal mask leaves. The kernel does not compute the other half."""


def run(
    note: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """Stand-in for `scaled_dot_product_attention`. Calls `note` with the work of forward and of backward."""
    attention = _Attention(note, attn_mask, CAUSAL if is_causal else 1.0)
    out: Tensor = _AttentionFunction.apply(attention, cast(query), cast(key), cast(value))  # type: ignore[no-untyped-call]
    return out


class _Attention:
    """The work of one attention operator."""

    def __init__(self, note: Any, mask: Tensor | None, part: float) -> None:
        self.note, self.mask, self.part = note, mask, part

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Work:
        flops = self.part * sdpa_flop_count(*_shapes(query, key, value))  # type: ignore[no-untyped-call]
        return Work("attention", arithmetic(query), flops, size_of(query, key, value, out, self.mask))

    def backward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Work:
        shapes = _shapes(query, key, value)
        result = (*shapes[0][:-1], shapes[2][-1])
        flops = self.part * sdpa_backward_flop_count(result, *shapes)  # type: ignore[no-untyped-call]
        # The kernel reads the inputs, the output and its gradient, and writes three gradients.
        moved = 2 * size_of(query, key, value, out) + size_of(self.mask)
        return Work("attention", arithmetic(query), flops, moved)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any, Any]:
    """Shapes (samples, heads, length, width). Keys and values that several heads share count once per head."""
    full = [(1,) * (4 - tensor.ndim) + tuple(tensor.shape) for tensor in (query, key, value)]
    flat = [(int(torch.Size(shape[:-3]).numel()), *shape[-3:]) for shape in full]
    samples, heads = flat[0][:2]
    return flat[0], (samples, heads, *flat[1][2:]), (samples, heads, *flat[2][2:])


class _AttentionFunction(torch.autograd.Function):
    """Allocates the tensors of the fused kernels, and notes their work."""

    @staticmethod
    def forward(ctx: Any, attention: _Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.attention = attention
        ctx.save_for_backward(query, key, value, out, sums)
        attention.note([attention.forward(query, key, value, out)])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        ctx.attention.note([ctx.attention.backward(query, key, value, out)])
        return None, *(torch.empty_like(tensor) for tensor in (query, key, value))
