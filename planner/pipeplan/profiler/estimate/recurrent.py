"""Recurrent layers as cuDNN runs them: one matrix product for the inputs of all steps, then one product per step.

Source: J. Appleyard, T. Kočiský and P. Blunsom, Optimizing Performance of Recurrent Neural Networks on GPUs, 2016. The
gates and cells of every step, the outputs of every layer, and the input are saved for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeplan.profiler.estimate.work import Work, arithmetic, cast


def is_plain(x: Any, hidden: Any, *others: Any) -> bool:
    """Whether the arguments are a batch of sequences of one length, without a projection of the output."""
    if not isinstance(x, Tensor) or not isinstance(hidden, Tensor | list | tuple):
        return False
    return isinstance(hidden, Tensor) or len({one.shape[-1] for one in hidden}) == 1


def run(
    note: Any, gates: int, x: Tensor, hidden: Tensor | Sequence[Tensor], parameters: Sequence[Tensor], biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Stand-in for `lstm`, `gru` and `rnn_…`. Returns (output, last states …), and calls `note` with the work."""
    states = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
    samples, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    recurrence = Recurrence(
        gates, samples, steps, x.shape[2], states[0].shape[-1], layers, 2 if bidirectional else 1,
        x.element_size() if cast(x) is x else cast(x).element_size(), arithmetic(cast(x)),
    )  # fmt: skip
    results: tuple[Tensor, ...] = _RecurrenceFunction.apply(  # type: ignore[no-untyped-call]
        note, recurrence, len(states), cast(x), *map(cast, states), *map(cast, parameters)
    )
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
        """Count of numbers that are saved for backward besides input and output."""
        per_layer = self.steps * self.samples * self.width * self.directions
        return per_layer * (self.layers * (self.gates + (self.gates == 4)) + self.layers - 1)

    def forward(self) -> list[Work]:
        """The work of forward: for every layer and direction, the inputs' product and the steps'."""
        works = []
        for inputs in self._inputs():
            works += [self._input_product(inputs, self.gates * self.width), self._steps()]
        return works

    def backward(self, first: bool) -> list[Work]:
        """The work of backward. `first` says whether the gradient of the first layer's inputs is computed."""
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
        """One product after another. Each reads the weights again."""
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
    def forward(ctx: Any, note: Any, recurrence: Recurrence, states: int, x: Tensor, *others: Tensor) -> Any:
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
