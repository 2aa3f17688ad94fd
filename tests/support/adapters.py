"""Models whose weights are frozen, in 32 or in 8 bits, with small trained adapters beside them (LoRA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint


class EightBits(Tensor):
    """A matrix of 8 bits with a scale for each row, as libraries of quantisation hold it."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> EightBits:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _meta: None, _size: Any, _stride: Any) -> EightBits:
        return EightBits(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return EightBits(args[0].codes, args[0].scales)
        plain = tree_map_only(EightBits, lambda one: one.codes * one.scales, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def quantised(weight: Tensor) -> nn.Parameter:
    """The weight in 8 bits, frozen."""
    scales = weight.detach().abs().amax(dim=1, keepdim=True) / 127
    return nn.Parameter(EightBits((weight.detach() / scales).round().to(torch.int8), scales), requires_grad=False)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of rank 2."""

    def __init__(self, width: int, *, eight_bits: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        if eight_bits:
            self.base.weight = quantised(self.base.weight)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + 2.0 * self.up(self.down(x)))


class AdaptedChain(nn.Module):
    """A frozen layer, adapted blocks, and an output that has the frozen layer's weights."""

    def __init__(self, width: int = 8, blocks: int = 3, *, eight_bits: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(width, eight_bits=eight_bits) for _ in range(blocks))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints and self.training else block(x)
        return functional.linear(x, self.first.weight)
