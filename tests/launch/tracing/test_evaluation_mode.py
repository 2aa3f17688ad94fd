"""Evaluation stage by stage gives what the model gives, and changes no state, or is refused."""

from __future__ import annotations

import pytest
import torch
from stagewise import BATCH, job_of, train_beside_one_process
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from pipeplan_launch.tracing.trace import trace_job


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


class Doubles(nn.Module):
    """As a parametrization, or as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if self.training else 1.0)


def parametrized() -> nn.Module:
    module = linear()
    parametrize.register_parametrization(module, "weight", Doubles())
    return module


class Chooses(nn.Module):
    """Reads another buffer in evaluation, by the same operators."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.one if self.training else self.other)


def is_training(module: nn.Module) -> bool:
    return module.training


class Asks(nn.Module):
    """Its own source does not mention the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if is_training(self) else x - 1


class Follows(nn.Module):
    """Statistics that only training updates, as by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)
        return x - self.mean


class DropsPaths(nn.Module):
    """Stochastic depth (Huang et al., 2016), as Hugging Face and timm write it; export inserts nodes for its sizes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = 0.8 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)
        return x.div(0.8) * kept.floor_()


def test_layers_that_ask_for_the_mode_are_taken_whole() -> None:
    torch.manual_seed(0)
    asking = [spectral_norm(linear()), parametrizations.spectral_norm(linear()), parametrized()]
    asking += [Chooses(), Asks(), Follows(), DropsPaths()]
    job = job_of(nn.Sequential(linear(), *asking, nn.Dropout(0.2), nn.BatchNorm1d(4), linear()))
    traced = train_beside_one_process(job)
    assert traced.how == "torch.export; taken whole: 1, 2, 3, 4, 5, 6, 7"
    assert [layer.module for layer in traced.layers[:-1]] == [str(number) for number in range(11)]


def test_parametrizations_without_a_mode_are_traced_and_so_is_a_model_with_one() -> None:
    for make in (parametrizations.weight_norm, parametrizations.orthogonal):
        torch.manual_seed(0)
        traced = train_beside_one_process(job_of(nn.Sequential(linear(), make(linear()), linear())))
        assert traced.how == "torch.export"
    train_beside_one_process(job_of(parametrizations.spectral_norm(linear())))


class Block(nn.Module):
    """Several layers, one of which evaluation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.training else x


def hooked() -> nn.Module:
    module = linear()
    module.register_forward_hook(lambda module, inputs, output: output * 2 if module.training else output)
    return module


def test_other_modules_train_and_are_not_evaluated() -> None:
    for make, name in ((Block, "Block"), (hooked, "Linear")):
        torch.manual_seed(0)
        job = job_of(nn.Sequential(linear(), make(), linear()))
        traced = train_beside_one_process(job, evaluates=False)
        assert traced.evaluation_problem is not None
        assert traced.evaluation_problem.startswith(f"{name} does other work in evaluation mode")


def test_torch_modules_need_one_export_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: calls.append(1) or export(*args, **kwargs))
    job = job_of(nn.Sequential(linear(), nn.Dropout(0.2), nn.BatchNorm1d(4), linear()))
    assert trace_job(job, BATCH).evaluation_problem is None
    assert len(calls) == 1
