"""The correction of steps by itself; whole runs are compared with the formula in `test_semantics`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.step_correction import StepCorrection, make_correction


def weight(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def corrected(parameter: nn.Parameter, correction: StepCorrection, steps: list[float], *, aside: bool) -> list[float]:
    """The values after steps that add these numbers; `aside`: whether somebody else keeps the old values."""
    values = []
    for step in steps:
        old = parameter.data.clone()
        if aside:
            correction.around(lambda: parameter.data.add_(step), ["w"], lambda _: old)  # noqa: B023
        else:
            correction.around(lambda: parameter.data.add_(step), ["w"], lambda _: None)  # noqa: B023
        values.append(float(parameter.detach()))
    return values


@pytest.mark.parametrize("aside", [True, False])
@pytest.mark.parametrize(
    ("delay", "expected"), [(1, [1.0, 1 + 2 + 1, 4 + 4 + 2, 10 + 8 + 4]), (2, [1.0, 3.0, 3 + 4 + 3, 10 + 8 + 6])]
)
def test_the_formula_by_hand(delay: int, expected: list[float], aside: bool) -> None:
    parameter = weight(0.0)
    assert corrected(parameter, StepCorrection({"w": parameter}, delay), [1, 2, 4, 8], aside=aside) == expected


@pytest.mark.parametrize(("before", "after", "kept"), [(3, 3, [2, 4, 8]), (3, 2, [4, 8]), (1, 3, [8])])
def test_what_is_saved_serves_stages_with_other_delays(before: int, after: int, kept: list[float]) -> None:
    parameter = weight(0.0)
    first = StepCorrection({"w": parameter}, before)
    corrected(parameter, first, [1, 2, 4, 8], aside=False)
    counts, tensors = first.saved()
    second = StepCorrection({"w": parameter}, after)
    second.restore(counts, lambda names: {name: tensors[name].clone() for name in names}, "here")
    assert [float(step) for step in second.steps["w"]] == kept


@pytest.mark.parametrize("count", [-1, "2", 1.5, True, None])
def test_a_damaged_count_is_refused(count: object) -> None:
    with pytest.raises(LaunchError, match="here: the number of steps of 'w' is damaged"):
        StepCorrection({"w": weight(0.0)}, 1).restore({"w": count}, lambda _: {}, "here")


def test_plain_sgd_is_refused_unless_forced() -> None:
    parameters = {"w": weight(0.0)}
    plain = SGD(parameters.values(), lr=0.1)
    with pytest.raises(LaunchError, match="lowers the largest stable rate of SGD without momentum"):
        make_correction("ef", parameters, plain, 1, asked=True, force=False)
    assert make_correction("ef", parameters, plain, 1, asked=True, force=True) is not None
    assert make_correction("ef", parameters, plain, 0, asked=True, force=False) is None
    assert make_correction("none", parameters, plain, 1, asked=True, force=False) is None
    for optimizer in (SGD(parameters.values(), lr=0.1, momentum=0.9), AdamW(parameters.values())):
        assert make_correction("ef", parameters, optimizer, 2, asked=True, force=False) is not None


def test_what_only_the_plan_names_is_left_out_where_it_harms() -> None:
    parameters = {"w": weight(0.0)}
    assert make_correction("ef", parameters, SGD(parameters.values(), lr=0.1), 1, asked=False, force=False) is None
    assert make_correction("ef", parameters, AdamW(parameters.values()), 1, asked=False, force=False) is not None
