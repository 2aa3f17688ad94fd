"""Replaces operators that a GPU runs as fused kernels, but that fake tensors would decompose.

Each replacement makes tensors of the right sizes, saves the tensors that the GPU's kernel would save, and notes the
work of that kernel. There is one for recurrent layers as in cuDNN, for attention that never stores its score matrix,
and for dropout that saves a mask of bytes.
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
    """Replaces the operators while it is active, and calls `note` with their work."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of `func`."""
        keywords = kwargs or {}
        if func in _ATTENTION:
            return attention.run(self._note, *args, **keywords)
        if func in _RECURRENT and recurrent.is_plain(*args):
            return recurrent.run(self._note, _RECURRENT[func], *args)
        if func is aten.dropout.default and args[2] and 0 < args[1] < 1:
            return aten.native_dropout.default(args[0], args[1], True)[0]
        return func(*args, **keywords)


_ATTENTION = (aten.scaled_dot_product_attention.default, functional.scaled_dot_product_attention)
_RECURRENT = {aten.lstm.input: 4, aten.gru.input: 3, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}
"""Number of gates of each recurrent operator."""
