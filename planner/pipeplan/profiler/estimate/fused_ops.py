"""Replaces operators that a GPU runs as fused kernels, but that fake tensors would decompose.

Each replacement makes tensors of the right sizes, saves the tensors that the GPU's kernel would save, and notes the
work of that kernel. There are three. Dropout saves a mask of bytes. Attention saves its inputs, its output and one
number per query, but never its score matrix. Recurrent layers work as in cuDNN: they run one matrix product for the
inputs of all steps, then one product per step, and save the gates and cells of every step, the outputs of every layer,
and the input.

Source of the recurrent layers: J. Appleyard, T. Kočiský and P. Blunsom, Optimizing Performance of Recurrent Neural
Networks on GPUs, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from pipeplan.profiler.estimate.work import Work, arithmetic_of, autocast_tensor, bytes_of

aten = torch.ops.aten
Note = Callable[[list[Work]], None]
CAUSAL_SHARE = 0.5
"""Share of the score matrix that a causal mask leaves. The kernel does not compute the other half."""
_ATTENTION = (aten.scaled_dot_product_attention.default, functional.scaled_dot_product_attention)
_RECURRENT = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}
"""Number of gates of each recurrent operator."""


def run_attention(
    note: Note, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """Replacement for `scaled_dot_product_attention`. Calls `note` with the work of forward and of backward."""
    share = CAUSAL_SHARE if is_causal else 1.0
    tensors = map(autocast_tensor, (query, key, value))
    out: Tensor = _AttentionFunction.apply(note, bytes_of(attn_mask), share, *tensors)  # type: ignore[no-untyped-call]
    return out


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any, Any]:
    """Shapes (samples, heads, length, width). Keys and values that several heads share count once per head."""
    full = [(1,) * (4 - tensor.ndim) + tuple(tensor.shape) for tensor in (query, key, value)]
    flat = [(int(torch.Size(shape[:-3]).numel()), *shape[-3:]) for shape in full]
    samples, heads = flat[0][:2]
    return flat[0], (samples, heads, *flat[1][2:]), (samples, heads, *flat[2][2:])


class _AttentionFunction(torch.autograd.Function):
    """Allocates the tensors of the fused kernels, and notes their work."""

    @staticmethod
    def forward(
        ctx: Any, note: Note, mask_bytes: float, share: float, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.note, ctx.mask_bytes, ctx.share = note, mask_bytes, share
        ctx.save_for_backward(query, key, value, out, sums)
        flops = share * sdpa_flop_count(*_shapes(query, key, value))  # type: ignore[no-untyped-call]
        note([Work("attention", arithmetic_of(query), flops, bytes_of(query, key, value, out) + mask_bytes)])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        shapes = _shapes(query, key, value)
        result = (*shapes[0][:-1], shapes[2][-1])
        flops = ctx.share * sdpa_backward_flop_count(result, *shapes)  # type: ignore[no-untyped-call]
        # The kernel reads the inputs, the output and its gradient, and writes three gradients.
        moved = 2 * bytes_of(query, key, value, out) + ctx.mask_bytes
        ctx.note([Work("attention", arithmetic_of(query), flops, moved)])
        return None, None, None, *(torch.empty_like(tensor) for tensor in (query, key, value))


def is_plain_recurrence(x: Any, hidden: Any, *others: Any) -> bool:
    """Whether the arguments are a batch of sequences of equal length, without a projection of the output."""
    if not isinstance(x, Tensor) or not isinstance(hidden, Tensor | list | tuple):
        return False
    return isinstance(hidden, Tensor) or len({tensor.shape[-1] for tensor in hidden}) == 1


def run_recurrence(
    note: Note, gates: int, x: Tensor, hidden: Tensor | Sequence[Tensor], parameters: Sequence[Tensor], biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Replacement for `lstm`, `gru` and `rnn_…`. Returns (output, last states …), and calls `note` with the work."""
    states = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
    samples, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    x, *others = map(autocast_tensor, (x, *states, *parameters))
    recurrence = Recurrence(
        gates, samples, steps, x.shape[2], states[0].shape[-1], layers, 2 if bidirectional else 1, x.element_size(),
        arithmetic_of(x),
    )  # fmt: skip
    results: tuple[Tensor, ...] = _RecurrenceFunction.apply(note, recurrence, len(states), x, *others)  # type: ignore[no-untyped-call]
    return results


@dataclass(frozen=True)
class Recurrence:
    """A stack of recurrent layers over one minibatch."""

    gates: int
    """Number of gates: 4 in an LSTM, 3 in a GRU, 1 in a plain network."""
    samples: int
    steps: int
    inputs: int
    """Width of the input."""
    width: int
    layers: int
    directions: int
    element_bytes: int
    arithmetic: str

    @property
    def kept(self) -> int:
        """Number of values that are saved for backward besides input and output."""
        per_layer = self.steps * self.samples * self.width * self.directions
        return per_layer * (self.layers * (self.gates + (self.gates == 4)) + self.layers - 1)

    def forward(self) -> list[Work]:
        """The work of forward: for every layer and direction, a product of all inputs and a product for each step."""
        works = []
        for inputs in self._inputs():
            works += [self._input_product(inputs, self.gates * self.width), self._steps()]
        return works

    def backward(self, first: bool) -> list[Work]:
        """The work of backward. `first`: whether the gradient of the first layer's inputs is computed."""
        works = []
        for index, inputs in enumerate(self._inputs()):
            works.append(self._steps())
            if first or index >= self.directions:
                works.append(self._input_product(self.gates * self.width, inputs))
            works.append(self._weights(inputs))
        return works

    def _inputs(self) -> list[int]:
        above = [self.width * self.directions] * (self.layers - 1)
        return [inputs for inputs in (self.inputs, *above) for _ in range(self.directions)]

    def _input_product(self, inner: int, columns: int) -> Work:
        rows = self.steps * self.samples
        moved = (rows * (inner + columns) + inner * columns) * self.element_bytes
        return Work("matmul", self.arithmetic, 2.0 * rows * inner * columns, float(moved), (rows, columns))

    def _weights(self, inputs: int) -> Work:
        """The gradients of the weights of inputs and states, over all steps at once."""
        rows, columns, inner = self.gates * self.width, inputs + self.width, self.steps * self.samples
        moved = (inner * (rows + columns) + rows * columns) * self.element_bytes
        return Work("matmul", self.arithmetic, 2.0 * rows * inner * columns, float(moved), (rows, columns))

    def _steps(self) -> Work:
        """The products of the steps, which run one after another. Each reads the weights again."""
        columns = self.gates * self.width
        moved = columns * self.width + self.samples * (2 * columns + 3 * self.width)
        flops = 2.0 * self.samples * self.width * columns
        return Work(
            "recurrent",
            self.arithmetic,
            self.steps * flops,
            float(self.steps * moved * self.element_bytes),
            (self.samples, columns),
            kernels=self.steps,
        )


class _RecurrenceFunction(torch.autograd.Function):
    """Allocates the tensors of cuDNN's kernels, and notes their work."""

    @staticmethod
    def forward(ctx: Any, note: Note, recurrence: Recurrence, states: int, x: Tensor, *others: Tensor) -> Any:
        ctx.note, ctx.recurrence = note, recurrence
        out = x.new_empty((*x.shape[:2], recurrence.width * recurrence.directions))
        last = [torch.empty_like(state) for state in others[:states]]
        ctx.save_for_backward(x, *others, out, x.new_empty(recurrence.kept))
        note(recurrence.forward())
        return (out, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *others, _, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        ctx.note(ctx.recurrence.backward(wanted[0]))
        made = [torch.empty_like(saved) if want else None for saved, want in zip((x, *others), wanted, strict=True)]
        return None, None, None, *made


class FusedOperators(TorchFunctionMode):
    """Replaces these operators while it is active, and calls `note` with their work."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of `func`."""
        keywords = kwargs or {}
        if func in _ATTENTION:
            return run_attention(self._note, *args, **keywords)
        if func in _RECURRENT and is_plain_recurrence(*args):
            return run_recurrence(self._note, _RECURRENT[func], *args)
        if func is aten.dropout.default and args[2] and 0 < args[1] < 1:
            return aten.native_dropout.default(args[0], args[1], True)[0]
        return func(*args, **keywords)
