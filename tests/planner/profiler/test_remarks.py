"""What a profile says of a model that is not all in its layers, or whose layers do not add up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profiler.profiler import layer_sum_remarks, unread_parameter_remarks
from pipeplan_launch import Job
from pipeplan_launch.tracing.trace import trace_job


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


def test_parameters_that_no_output_depends_on_are_named() -> None:
    def remarks(model: nn.Module) -> list[str]:
        return unread_parameter_remarks(trace_job(Job(model, inputs=lambda n: torch.randn(n, 2)), 3))

    (said,) = remarks(Half())
    assert said.endswith("unused.weight, unused.bias")
    assert not remarks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("whole", "says"), [((1.0, 2.0), []), ((0.8, 2.0), ["1.25 of it forward"]), ((1.0, 2.5), ["0.80 of it backward"])]
)
def test_layers_that_do_not_add_up(whole: tuple[float, float], says: list[str]) -> None:
    layers = (Layer("a", 0.25, 0.5, 0, 0), Layer("b", 0.75, 1.5, 0, 0))
    said = layer_sum_remarks(Size(1, layers, (), *whole))
    assert len(said) == len(says)
    assert all(part in said[0] for part in says)
    assert not layer_sum_remarks(Size(1, layers, ()))
