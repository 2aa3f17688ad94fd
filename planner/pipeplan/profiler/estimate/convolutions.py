"""The work of a convolution and of its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.utils.flop_counter import conv_flop_count

from pipeplan.profiler.estimate.tensors import arithmetic, size_of
from pipeplan.profiler.estimate.work import Tiles, Work

OUTPUTS_A_SIDE = 4
"""m of F(m×m, r×r): what cuDNN multiplies in pieces of, for filters of 3×3 and 5×5."""
FILTERS = (3, 5)


class Convolution:
    """One convolution, by its tensors (the input, the weights, the output) and settings."""

    def __init__(
        self, x: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], dilation: Sequence[int], *,
        transposed: bool, groups: int,
    ) -> None:  # fmt: skip
        self.x, self.weight, self.out = x, weight, out
        self.groups, self.transposed = groups, transposed
        self.plain = not transposed and groups == 1 and set(stride) == {1} and set(dilation) == {1}
        self.flops = float(conv_flop_count(list(x.shape), list(weight.shape), list(out.shape), transposed=transposed))
        self.inputs, self.outputs = x.shape[1] // groups, out.shape[1] // groups
        self.bytes = size_of(x) + size_of(weight) + size_of(out)

    def forward(self, *, bias: bool) -> list[Work]:
        """The convolution, and the addition of a bias, which is a kernel of its own."""
        added = [Work("elementwise", arithmetic(self.x), bytes=2 * size_of(self.out))] if bias else []
        return [self._product("convolution", self.outputs, _places(self.out)), *added]

    def backward(self, wanted: Sequence[bool]) -> list[Work]:
        """The gradients by the input, the weights and the bias, those that are wanted."""
        by_input, by_weight, by_bias = wanted
        works = []
        if by_input:
            works.append(self._product("convolution", self.inputs, _places(self.x)))
        if by_weight:
            filters = self.inputs * math.prod(self.weight.shape[2:])
            works.append(self._product("weight_gradient", self.outputs, filters))
        if by_bias:
            works.append(Work("elementwise", arithmetic(self.x), bytes=size_of(self.out)))
        return works

    def _product(self, kind: str, rows: int, columns: int) -> Work:
        # One channel a group is no matrix product: memory bounds it.
        alone = self.groups > 1 and 1 in (self.inputs, self.outputs)
        sides = None if alone else (rows, columns)
        return Work(kind, arithmetic(self.x), self.flops, self.bytes, sides, tiles=self._tiles(kind, rows))

    def _tiles(self, kind: str, rows: int) -> Tiles | None:
        side = self.weight.shape[-1]
        if not self.plain or self.weight.ndim != 4 or side not in FILTERS or self.weight.shape[-2] != side:
            return None
        count = self.out.shape[0] * math.prod(math.ceil(size / OUTPUTS_A_SIDE) for size in self.out.shape[2:])
        points = (OUTPUTS_A_SIDE + side - 1) ** 2
        channels = self.inputs + self.outputs
        transformed = float(points * count * channels * self.x.element_size())
        return Tiles(
            flops=2.0 * points * count * self.inputs * self.outputs,
            bytes=size_of(self.x) + size_of(self.out) + 2 * transformed,
            workspace_bytes=transformed,
            sides=(rows, self.inputs if kind == "weight_gradient" else count),
        )


def _places(tensor: Tensor) -> int:
    return int(tensor.shape[0] * math.prod(tensor.shape[2:]))
