"""An optimiser's step whose new weights go to other memory, so that the old ones stay where they are.

A stage with several weight versions must not change the weights that minibatches in flight still read. The plain way is
to copy them to other memory, and let the optimiser change the copy. But `torch.optim.SGD` changes a parameter in one
operation, `add_`, which can as well read the old memory and write to the new one: then nothing is copied. Results are
bitwise the same, because the operation is.

Everything else is copied. Fused kernels read and write one memory. Adam and its relatives change a parameter in several
operations between others that take longer, and gain nothing (`tests/benchmarks/weight_versions.py`). Operations on
small parameters take less time than redirecting them, and on a GPU a copy is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

REDIRECTED: tuple[type[Optimizer], ...] = (optim.SGD,)
"""The optimisers that are faster so, and whose every write to a parameter is on the parameter itself, not on a view."""
SMALLEST_MEAN_BYTES = 1 << 19
"""Mean size of a stage's parameters below which redirecting takes longer than copying."""

_aten = torch.ops.aten
_ADD, _ADD_LISTS = _aten.add_.Tensor, _aten._foreach_add_.List


def is_worthwhile(parameters: Collection[nn.Parameter]) -> bool:
    """Whether handing over the weights of these parameters takes less time than to copy them."""
    return (
        bool(parameters)
        and sum(parameter.nbytes for parameter in parameters) >= SMALLEST_MEAN_BYTES * len(parameters)
        and all(parameter.device.type == "cpu" and not parameter.is_complex() for parameter in parameters)
    )


def can_redirect(optimizer: Optimizer | None) -> bool:
    """Whether an optimiser's next step can write the new weights elsewhere. Groups and hooks may change any time."""
    if type(optimizer) not in REDIRECTED:
        return False
    assert optimizer is not None
    step = vars(optimizer).get("step")
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    unfit = any(group.get(setting) for group in optimizer.param_groups for setting in ("fused", "differentiable"))
    return not (replaced or hooked or unfit)


class HandedOver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this is entered, the first write to a parameter moves it to other memory, and leaves the old one as it is.

    On leaving, parameters that nothing has written to are copied.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], memory_for: Callable[[nn.Parameter], Tensor]) -> None:
        """`memory_for` returns memory of a parameter's shape and type, of whatever content."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._to_move = {id(parameter): parameter for parameter in parameters}
        self._memory_for = memory_for

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, elsewhere if it is the first that writes to a parameter."""
        settings = kwargs or {}
        if not self._to_move or not func._schema.is_mutable:
            return func(*args, **settings)
        if func is _ADD and id(args[0]) in self._to_move:
            self._add(args[0], args[1], settings)
            return args[0]
        if func is _ADD_LISTS and any(id(tensor) in self._to_move for tensor in args[0]):
            for tensor, other in zip(*args, strict=True):
                self._add(tensor, other, settings)
            return None
        for argument, declared in zip(args, func._schema.arguments, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                    self._copy(tensor)
        return func(*args, **settings)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Move what was not moved."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for parameter in list(self._to_move.values()):
            self._copy(parameter)

    def _add(self, tensor: Tensor, other: Tensor, settings: Mapping[str, Any]) -> None:
        """Write the sum to the tensor's new memory, or to its own if it need not move."""
        parameter = self._to_move.pop(id(tensor), None)
        into = tensor.detach() if parameter is None else self._memory_for(parameter)
        torch.add(tensor.detach(), other, **settings, out=into)
        if parameter is not None:
            parameter.data = into

    def _copy(self, tensor: Tensor) -> None:
        parameter = self._to_move.pop(id(tensor), None)
        if parameter is not None:
            parameter.data = self._memory_for(parameter).copy_(parameter.data)
