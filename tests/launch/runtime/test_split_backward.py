"""Gradients of a backward pass in two parts, against those of one, in 64-bit numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeplan_launch.runtime.backward_passes import SplitBackward

torch.set_num_threads(1)
Stage = Callable[[dict[str, Tensor], Tensor], Sequence[Tensor]]


class Doubled(torch.autograd.Function):
    """A node written in Python, which may be executed only once."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = (x, weight)  # type: ignore[attr-defined]
        return x * weight

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.kept  # type: ignore[attr-defined]
        del ctx.kept  # type: ignore[attr-defined]
        return gradients[0] * weight, gradients[0] * x


def plain(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    return [functional.linear(functional.linear(x, w["a"], w["e"]).relu(), w["b"])]


def used_twice(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    return [functional.linear(functional.linear(x, w["a"]).tanh(), w["a"].t()) + functional.linear(x, w["b"])]


def skips(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    inside = functional.linear(x, w["a"]).relu()
    return [functional.linear(inside, w["b"]), inside * 2, x * w["e"]]


def apart(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """One output that no input leads to, and a weight that goes into it and into another."""
    return [functional.linear(x, w["a"]), functional.linear(w["b"], w["a"]) * w["e"].sum()]


def normed(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    inside = functional.layer_norm(functional.dropout(x, 0.3), (4,), w["e"], w["f"])
    return [
        functional.multi_head_attention_forward(
            inside,
            inside,
            inside,
            4,
            2,
            torch.cat([w["a"], w["b"], w["c"]]),
            None,
            None,
            None,
            False,
            0.0,
            w["c"],
            None,
            need_weights=False,
        )[0]
    ]


def in_python(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    return [Doubled.apply(functional.linear(x, w["a"]), w["e"]).sin()]  # type: ignore[no-untyped-call]


def checkpointed(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    return [
        functional.linear(checkpoint(lambda y: functional.linear(y, w["a"]).tanh(), x, use_reentrant=False), w["b"])
    ]


def unused(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    return [x * 2, functional.linear(x, w["a"].detach(), w["e"])]


def in_views(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    first, second = functional.linear(x, torch.cat([w["a"], w["b"]])).chunk(2, -1)
    return [first * second.sigmoid() + w["a"].sum()]


STAGES = [plain, used_twice, skips, apart, normed, in_python, checkpointed, unused, in_views]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_two_parts_give_the_gradients_of_one(stage: Stage) -> None:
    results = []
    for splits in (False, True):
        torch.manual_seed(1)
        weights = {name: torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for name in "abc"}
        weights |= {name: torch.randn(4, dtype=torch.float64, requires_grad=True) for name in "ef"}
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        roots = stage(weights, x)
        gradients = [torch.randn_like(root) for root in roots]
        if splits:
            split = SplitBackward(roots, [x], weights.values())
            split.inputs(gradients)
            assert all(weight.grad is None for weight in weights.values())
            sent = None if x.grad is None else x.grad.clone()
            split.weights()
            assert x.grad is sent or torch.equal(x.grad, sent)  # type: ignore[arg-type]
        else:
            torch.autograd.backward(roots, gradients)
        results.append([one.grad for one in (x, *weights.values())])
    for once, twice in zip(*results, strict=True):
        assert (once is None) == (twice is None)
        if once is not None and twice is not None:
            torch.testing.assert_close(once, twice, rtol=1e-12, atol=1e-12)


def test_weights_wait_where_they_can() -> None:
    """Every weight of modules used once gets its gradient in the second part, and none of the others."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)).double()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    split = SplitBackward([model(x)], [x], model.parameters())
    assert sum(len(one.leaves) for one in split._deferred) == len(list(model.parameters()))
    weights = {name: torch.randn(4, 4, requires_grad=True) for name in "ab"}
    split = SplitBackward(used_twice(weights, torch.randn(3, 4, requires_grad=True)), [], weights.values())
    assert not split._deferred


def test_a_sequence_of_lstm_cells_waits_for_nothing_that_is_shared() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4, 2).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    output = lstm(x)[0]
    lstm.zero_grad()
    gradient = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, *lstm.parameters()], gradient, retain_graph=True)
    split = SplitBackward([output], [x], lstm.parameters())
    split.inputs([gradient])
    split.weights()
    for one, weight in zip(expected, [x, *lstm.parameters()], strict=True):
        torch.testing.assert_close(one, weight.grad, rtol=1e-12, atol=1e-12)
