"""Operators that a GPU runs in one piece, where tensors without data would take them apart.

In place of each there is one that makes tensors of the right sizes, keeps what the GPU's own would keep, and says what
it does: recurrent layers as in cuDNN, attention that never writes its matrix down, dropout that keeps a mask of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipeplan.profiler.estimate import attention, recurrent
from pipeplan.profiler.estimate.work import Work

Note = Callable[[list[Work]], None]

aten = torch.ops.aten


class AsOnGPU(TorchFunctionMode):
    """Replaces these operators, while it is active; `note` is told of their work."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls in place of `func`."""
        given = kwargs or {}
        if func in _ATTENTION:
            return attention.run(self._note, *args, **given)
        if func in _RECURRENT and recurrent.is_plain(*args):
            return recurrent.run(self._note, _RECURRENT[func], *args)
        if func is aten.dropout.default and args[2] and 0 < args[1] < 1:
            return aten.native_dropout.default(args[0], args[1], True)[0]
        return func(*args, **given)


_ATTENTION = (aten.scaled_dot_product_attention.default, functional.scaled_dot_product_attention)
_RECURRENT = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}
"""Gates of each."""
