"""The work of ATen operators as they are dispatched on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pipeplan.profiler.estimate.convolutions import Convolution
from pipeplan.profiler.estimate.work import Work, arithmetic_of, bytes_of, tensors_in

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
"""Words in the names of operators whose time their bytes do not bound."""
_GROUPED = ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback")
_GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"
_OVERWRITE = ("zero_", "fill_", "copy_")


def works_of(func: Any, args: Any, kwargs: Any, out: Any) -> list[Work]:
    """The work of one call of an operator. Views and allocations have none."""
    packet = func.overloadpacket
    name = packet.__name__
    if name in _ALLOCATE or _is_view(func) or not tensors_in(out):
        return []
    special = _SPECIAL.get(packet)
    if special is not None:
        return special(args, kwargs, out)
    if func.name() in _GROUPED:
        left, right = tensors_in(args)[:2]
        return [_grouped_product(left, right, out)]
    if func.name() == _GROUPED_BACKWARD:
        return _grouped_backward(args, out)
    if packet in flop_registry:
        return [_product(packet, args, kwargs, out)]
    kind = next((kind for word, kind in _KIND_BY_WORD if word in name), "elementwise")
    inputs = args[1:] if name in _OVERWRITE else args
    return [Work(kind, arithmetic_of(args, out), bytes=bytes_of(inputs, kwargs) + bytes_of(out))]


def is_counted(func: Any) -> bool:
    """Whether the work of an operator is known: by its FLOPs, or by its bytes where these are all that counts."""
    packet = func.overloadpacket
    if packet in _SPECIAL or func.name() in (*_GROUPED, _GROUPED_BACKWARD) or packet in flop_registry:
        return True
    words = packet.__name__.split("_")
    if "vector" in words or "norm" in words:  # such as linalg_vector_norm
        return True
    return func.namespace in ("aten", "prims") and set(_COMPUTING).isdisjoint(words)


def _is_view(func: Any) -> bool:
    """Whether every result of the operator is a view of an input that the operator does not write to."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _product(packet: Any, args: Any, kwargs: Any, out: Any) -> Work:
    flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    product = tensors_in(out)[0]
    return Work("matmul", arithmetic_of(product), flops, bytes_of(args, out), (product.shape[-2], product.shape[-1]))


def _grouped_product(left: Tensor, right: Tensor, out: Any) -> Work:
    """The product of groups of rows, each with a matrix of its own, as in a mixture of experts.

    The shapes are (rows, inner) × (groups, inner, columns), where the groups divide the rows; (rows, inner) × (inner,
    columns), where they divide the inner dimension; or (groups, rows, inner) × (groups, inner, columns). However the
    rows are divided, the FLOPs are the same.
    """
    *several, rows, inner = left.shape
    columns = int(right.shape[-1])
    flops = 2.0 * rows * inner * columns * (several[0] if several and right.ndim == 3 else 1)
    each = rows if several or right.ndim == 2 else -(-rows // right.shape[0])
    return Work("matmul", arithmetic_of(left), flops, bytes_of(left, right, out), (int(each), columns))


def _grouped_backward(args: Any, out: Any) -> list[Work]:
    """The gradients of rows and matrices of a grouped product, from both, the groups' ends and its own gradient."""
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
    # All rows are set to 0. Those that were looked up are read, added to and written.
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


def _histogram(values: Any, bins: int = 100, *_: Any) -> Any:
    return values.new_empty(bins)


WITHOUT_DATA: dict[Any, Callable[..., Any]] = {aten.histc.default: _histogram}
"""Operators that torch cannot run on tensors without data, and what they return in shape and type."""
