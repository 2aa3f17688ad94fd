"""Clipping by one process: torch's own function says what is right. Over several stages: `test_training_features`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.stage_optimizer import GradientClipping


def gradients(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), ())]


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1e3])
def test_equals_torchs_own(scale: float) -> None:
    """Also where the norm is below the limit: then nothing changes."""
    parameters = [nn.Parameter(torch.zeros_like(one)) for one in gradients(scale)]
    for parameter, gradient in zip(parameters, gradients(scale), strict=True):
        parameter.grad = gradient
    expected = clip_grad_norm_(parameters, 0.5)
    ours = gradients(scale)
    assert GradientClipping(0.5, None, warns=True, where="").clip(ours) == pytest.approx(float(expected), rel=1e-12)
    for one, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-12, atol=0)


def test_nothing_to_clip() -> None:
    assert GradientClipping(0.5, None, warns=True, where="").clip([]) == 0.0


@pytest.mark.parametrize(("bad", "left"), [(math.nan, math.nan), (math.inf, 0.0)])
def test_a_norm_that_is_not_finite_is_said_once(bad: float, left: float, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left is what torch would leave: training goes on, and its loss tells the rest."""
    clipping, silent = (GradientClipping(0.5, None, warns=warns, where="of stage 2 ") for warns in (True, False))
    for one in (clipping, clipping, silent):
        given = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
        one.clip(given)
        assert float(given[1]) == pytest.approx(left, nan_ok=True)
    assert capsys.readouterr().err == f"warning: the norm of the gradients of stage 2 became non-finite ({bad})\n"


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(LaunchError, match="sparse gradients cannot be clipped"):
        GradientClipping(0.5, None, warns=True, where="").clip([torch.eye(3).to_sparse()])
