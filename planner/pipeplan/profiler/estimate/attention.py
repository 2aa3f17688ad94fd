"""Attention in one kernel each way, which keeps its inputs, its output and one number a query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from pipeplan.profiler.estimate.work import Work, arithmetic, cast, size_of

CAUSAL = 0.5
"""The part of the matrix that a causal mask leaves; the other half is not computed."""


def run(
    note: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """In place of `scaled_dot_product_attention`; `note` is told of the work."""
    one = _Attention(note, attn_mask, CAUSAL if is_causal else 1.0)
    made: Tensor = _Run.apply(one, cast(query), cast(key), cast(value))  # type: ignore[no-untyped-call]
    return made


class _Attention:
    def __init__(self, note: Any, mask: Tensor | None, part: float) -> None:
        self.note, self.mask, self.part = note, mask, part

    def forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Work:
        flops = self.part * sdpa_flop_count(*_shapes(query, key, value))  # type: ignore[no-untyped-call]
        return Work("attention", arithmetic(query), flops, size_of(query, key, value, out, self.mask))

    def backward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Work:
        shapes = _shapes(query, key, value)
        result = (*shapes[0][:-1], shapes[2][-1])
        flops = self.part * sdpa_backward_flop_count(result, *shapes)  # type: ignore[no-untyped-call]
        # Reads inputs, output and its gradient, and writes three gradients.
        moved = 2 * size_of(query, key, value, out) + size_of(self.mask)
        return Work("attention", arithmetic(query), flops, moved)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any, Any]:
    """Samples, heads, length, width of each; keys and values that several heads share counted once a head."""
    full = [(1,) * (4 - one.ndim) + tuple(one.shape) for one in (query, key, value)]
    flat = [(int(torch.Size(one[:-3]).numel()), *one[-3:]) for one in full]
    samples, heads = flat[0][:2]
    return flat[0], (samples, heads, *flat[1][2:]), (samples, heads, *flat[2][2:])


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: _Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.one = one
        ctx.save_for_backward(query, key, value, out, sums)
        one.note([one.forward(query, key, value, out)])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        ctx.one.note([ctx.one.backward(query, key, value, out)])
        return None, *(torch.empty_like(one) for one in (query, key, value))
