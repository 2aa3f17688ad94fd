"""The work of ATen operators as a GPU runs them. A convolution runs directly, or by transforms of tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, flop_registry

from pipeplan.profiler.estimate.work import TransformedWork, Work, arithmetic_of, bytes_of, tensors_in

aten = torch.ops.aten
_KIND_BY_WORD = (
    ("pool", "pooling"),
    ("norm", "normalisation"),
    ("softmax", "normalisation"),
    ("embedding", "embedding"),
)
_ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh")
_COMPUTING = (
    *("mm", "matmul", "addbmm", "conv2d", "conv3d", "fft", "linalg", "cholesky", "triangular", "lu", "svd", "eig"),
    *("inverse", "attention", "lstm", "gru", "rnn", "cdist", "bilinear"),
)
"""Words in the names of operators whose time is not limited by their bytes."""
_GROUPED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback")
_GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"
_OVERWRITE = ("zero_", "fill_", "copy_")


@dataclass(frozen=True)
class _Algorithm:
    """A transform of square tiles that turns a convolution into a pointwise product."""

    outputs: int
    """Outputs of the convolution per side of a tile."""
    numbers: int
    """Size of a transformed tile, in numbers of the tensors' type."""
    flops: int
    """FLOPs of a multiply-add of two transformed tiles."""


def _algorithm(side: int) -> _Algorithm | None:
    """cuDNN's alternative to direct convolution for filters of this size; None if it has nothing faster.

    Filters of 3×3 use Winograd's F(4×4, 3×3) with tiles of 6×6 (A. Lavin and S. Gray, Fast Algorithms for Convolutional
    Neural Networks, CVPR 2016). Larger filters use Fourier transforms of tiles of 32×32. Half of their complex numbers
    follow from the other half.
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
        # Channels are last if they are next to each other in memory.
        self.converted_bytes = 2 * sum(bytes_of(tensor) for tensor in (x, out) if tensor.stride(1) != 1)

    def forward(self, *, bias: bool) -> list[Work]:
        """The work of the convolution, and of adding a bias in a separate kernel."""
        added = [Work("elementwise", arithmetic_of(self.x), bytes=2 * bytes_of(self.out))] if bias else []
        return [self._product("convolution", self.outputs, _positions(self.out)), *added]

    def backward(self, wanted: Sequence[bool]) -> list[Work]:
        """The work of the gradients of input, weights and bias. `wanted`: for each of them, whether it is computed."""
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
        # A convolution with one channel per group is not a matrix product. Its time is limited by memory.
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


def _positions(tensor: Tensor) -> int:
    return int(tensor.shape[0] * math.prod(tensor.shape[2:]))


def works_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[Work], bool]:
    """(the work of one call of an operator, whether all of it is counted). Views and allocations have no work.

    The work has FLOPs, or only bytes if memory limits the operator.
    """
    packet = func.overloadpacket
    name = packet.__name__
    if name in _ALLOCATE or _is_view(func) or not tensors_in(out):
        return [], True
    if special := _SPECIAL.get(packet):
        return special(args, kwargs, out), True
    if func.name() in _GROUPED:
        left, right = tensors_in(args)[:2]
        return [_grouped_product(left, right, out)], True
    if func.name() == _GROUPED_BACKWARD:
        return _grouped_backward(args, out), True
    if packet in flop_registry:
        return [_product(packet, args, kwargs, out)], True
    kind = next((kind for word, kind in _KIND_BY_WORD if word in name), "elementwise")
    inputs = args[1:] if name in _OVERWRITE else args
    work = Work(kind, arithmetic_of(args, out), bytes=bytes_of(inputs, kwargs) + bytes_of(out))
    words = set(name.split("_"))
    bounded_by_bytes = func.namespace in ("aten", "prims") and words.isdisjoint(_COMPUTING)
    return [work], bounded_by_bytes or not words.isdisjoint(("vector", "norm"))  # such as linalg_vector_norm


def _is_view(func: Any) -> bool:
    """Whether every result of the operator is a view of an input that the operator does not write to."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _product(packet: Any, args: Any, kwargs: Any, out: Any) -> Work:
    flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    product = tensors_in(out)[0]
    return Work("matmul", arithmetic_of(product), flops, bytes_of(args, out), (product.shape[-2], product.shape[-1]))


def _grouped_product(left: Tensor, right: Tensor, out: Any) -> Work:
    """The products of groups of rows, each with its own matrix, as in a mixture of experts.

    If rows are grouped, the shapes are (rows, inner) × (groups, inner, columns). If the inner dimension is grouped,
    they are (rows, inner) × (inner, columns). Else they are (groups, rows, inner) × (groups, inner, columns). The FLOPs
    do not depend on how the rows are divided.
    """
    *several, rows, inner = left.shape
    columns = int(right.shape[-1])
    flops = 2.0 * rows * inner * columns * (several[0] if several and right.ndim == 3 else 1)
    each = rows if several or right.ndim == 2 else -(-rows // right.shape[0])
    return Work("matmul", arithmetic_of(left), flops, bytes_of(left, right, out), (int(each), columns))


def _grouped_backward(args: Any, out: Any) -> list[Work]:
    """The gradients of a grouped product. `args`: rows, matrices, ends of the groups, gradient of the product."""
    rows, matrices, _, gradient = args
    by_rows, by_matrices = tensors_in(out)[:2]
    return [
        _grouped_product(gradient, matrices.transpose(-2, -1), by_rows),
        _grouped_product(rows.transpose(0, 1), gradient, by_matrices),
    ]


def _convolve(args: Any, kwargs: Any, out: Any) -> list[Work]:
    x, weight, bias, stride, _, dilation, transposed, _, groups = args
    convolution = Convolution(x, weight, out, stride, dilation, transposed=transposed, groups=groups)
    return convolution.forward(bias=bias is not None)


def _convolve_backward(args: Any, kwargs: Any, out: Any) -> list[Work]:
    gradient, x, weight, _, stride, _, dilation, transposed, _, groups, wanted = args
    convolution = Convolution(x, weight, gradient, stride, dilation, transposed=transposed, groups=groups)
    return convolution.backward(wanted)


def _look_up(args: Any, kwargs: Any, out: Any) -> list[Work]:
    return [Work("embedding", arithmetic_of(out), bytes=bytes_of(args[1]) + 2 * bytes_of(out))]


def _look_up_backward(args: Any, kwargs: Any, out: Any) -> list[Work]:
    gradient, indices = args[:2]
    # All rows are set to 0. The rows that were looked up are then read, added to and written.
    cleared = Work("elementwise", arithmetic_of(out), bytes=bytes_of(out))
    return [cleared, Work("embedding", arithmetic_of(out), bytes=bytes_of(indices) + 3 * bytes_of(gradient))]


def _pool_backward(args: Any, kwargs: Any, out: Any) -> list[Work]:
    # Forward saves the indices of the maxima, so backward does not read the input.
    return [Work("pooling", arithmetic_of(out), bytes=bytes_of(args[0], args[-1], out))]


def _normalise(args: Any, kwargs: Any, out: Any) -> list[Work]:
    # The input is read twice: once for its statistics, and once to be normalised.
    return [Work("normalisation", arithmetic_of(args[0]), bytes=bytes_of(args, out) + bytes_of(args[0]))]


def _normalise_backward(args: Any, kwargs: Any, out: Any) -> list[Work]:
    return [Work("normalisation", arithmetic_of(args[0]), bytes=bytes_of(args, out) + bytes_of(args[0], args[1]))]


_SPECIAL: dict[Any, Callable[[Any, Any, Any], list[Work]]] = {
    aten.convolution: _convolve,
    aten.convolution_backward: _convolve_backward,
    aten.embedding: _look_up,
    aten.embedding_dense_backward: _look_up_backward,
    aten.max_pool2d_with_indices_backward: _pool_backward,
    aten.native_batch_norm: _normalise,
    aten.native_batch_norm_backward: _normalise_backward,
}


WITHOUT_DATA: dict[Any, Callable[..., Any]] = {aten.histc.default: lambda values, bins=100, *_: values.new_empty(bins)}
"""Operators that torch cannot run on tensors without data, with functions that return the right shape and type."""
