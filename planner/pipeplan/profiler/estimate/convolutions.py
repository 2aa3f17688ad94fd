"""The work of a convolution and its gradients, directly or by transforms of tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.flop_counter import conv_flop_count

from pipeplan.profiler.estimate.work import TransformedWork, Work, arithmetic_of, bytes_of


@dataclass(frozen=True)
class _Algorithm:
    """A transform of square tiles, under which a convolution becomes a pointwise product."""

    outputs: int
    """Outputs of the convolution per side of a tile."""
    numbers: int
    """Size of a transformed tile, in numbers of the tensors' type."""
    flops: int
    """FLOPs of a multiply-add of two transformed tiles."""


def _algorithm(side: int) -> _Algorithm | None:
    """cuDNN's alternative to direct convolution for filters of this size; None if it has nothing faster.

    Filters of 3×3 use Winograd's F(4×4, 3×3) with tiles of 6×6 (A. Lavin and S. Gray, Fast Algorithms for Convolutional
    Neural Networks, CVPR 2016). Larger ones use Fourier transforms of tiles of 32×32, half of whose complex numbers
    follow from the others.
    """
    if side == 3:
        return _Algorithm(outputs=4, numbers=36, flops=2 * 36)
    if 5 <= side < 32:
        return _Algorithm(outputs=32 - side + 1, numbers=2 * 32 * 17, flops=8 * 32 * 17)
    return None


class Convolution:
    """One convolution, described by its tensors (input, weights, output) and settings."""

    def __init__(
        self, x: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], dilation: Sequence[int], *,
        transposed: bool, groups: int,
    ) -> None:  # fmt: skip
        self.x, self.weight, self.out = x, weight, out
        self.groups, self.transposed = groups, transposed
        self.plain = not transposed and groups == 1 and set(stride) == {1} and set(dilation) == {1}
        self.flops = float(conv_flop_count(list(x.shape), list(weight.shape), list(out.shape), transposed=transposed))
        self.inputs, self.outputs = x.shape[1] // groups, out.shape[1] // groups
        self.bytes = bytes_of(x) + bytes_of(weight) + bytes_of(out)
        self.converted_bytes = 2 * sum(bytes_of(tensor) for tensor in (x, out) if not _channels_last(tensor))

    def forward(self, *, bias: bool) -> list[Work]:
        """The work of the convolution and of adding a bias, which is a kernel of its own."""
        added = [Work("elementwise", arithmetic_of(self.x), bytes=2 * bytes_of(self.out))] if bias else []
        return [self._product("convolution", self.outputs, _positions(self.out)), *added]

    def backward(self, wanted: Sequence[bool]) -> list[Work]:
        """The work of the gradients of input, weights and bias. `wanted` says for each whether it is computed."""
        by_input, by_weight, by_bias = wanted
        works = []
        if by_input:
            works.append(self._product("convolution", self.inputs, _positions(self.x)))
        if by_weight:
            filters = self.inputs * math.prod(self.weight.shape[2:])
            works.append(self._product("weight_gradient", self.outputs, filters))
        if by_bias:
            works.append(Work("elementwise", arithmetic_of(self.x), bytes=bytes_of(self.out)))
        return works

    def _product(self, kind: str, rows: int, columns: int) -> Work:
        # A convolution with one channel per group is no matrix product: memory bounds it.
        depthwise = self.groups > 1 and 1 in (self.inputs, self.outputs)
        sides = None if depthwise else (rows, columns)
        return Work(
            kind,
            arithmetic_of(self.x),
            self.flops,
            self.bytes,
            sides,
            converted_bytes=self.converted_bytes,
            transformed=self._transformed(kind, rows),
        )

    def _transformed(self, kind: str, rows: int) -> TransformedWork | None:
        side = self.weight.shape[-1]
        square = self.weight.ndim == 4 and self.weight.shape[-2] == side
        algorithm = _algorithm(side) if self.plain and square else None
        if algorithm is None:
            return None
        tiles = self.out.shape[0] * math.prod(math.ceil(size / algorithm.outputs) for size in self.out.shape[2:])
        transformed_bytes = float(algorithm.numbers * tiles * (self.inputs + self.outputs) * self.x.element_size())
        return TransformedWork(
            flops=float(algorithm.flops * tiles * self.inputs * self.outputs),
            bytes=bytes_of(self.x) + bytes_of(self.out) + 2 * transformed_bytes,
            workspace_bytes=transformed_bytes,
            sides=(rows, self.inputs if kind == "weight_gradient" else tiles),
        )


def _channels_last(tensor: Tensor) -> bool:
    return tensor.stride(1) == 1


def _positions(tensor: Tensor) -> int:
    return int(tensor.shape[0] * math.prod(tensor.shape[2:]))
