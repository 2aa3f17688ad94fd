"""What is watched while a model is traced, whatever torch has made it of."""

from __future__ import annotations

from typing import Any

import torch

from pipeplan_launch.tracing.export_hazards import _unbound


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 10 * gradients[0]


def test_class_methods_of_python_and_of_c_are_called_for_the_class_that_is_given() -> None:
    made = _unbound(dict.__dict__["fromkeys"])(dict, "ab", 1)
    assert made == {"a": 1, "b": 1}
    x = torch.ones(1, requires_grad=True)
    for method in (torch.autograd.Function.__dict__["apply"], torch._C._FunctionBase.__dict__["apply"]):
        x.grad = None
        _unbound(method)(Doubled, x).backward()
        assert x.grad is not None
        assert x.grad.item() == 10
