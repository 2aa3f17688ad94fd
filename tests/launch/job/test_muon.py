"""Muon for matrices and AdamW for the rest, as one optimiser: equal to both of torch's, also from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from pipeplan_launch import StageInfo, muon
from pipeplan_launch.checkpoint.optimizer_state import load_optimizer, optimizer_state
from pipeplan_launch.errors import LaunchError


def muon_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def updates(model: nn.Module, optimizers: list[Optimizer], first: int, count: int) -> list[torch.Tensor]:
    """The weights after so many updates, of samples that depend on the number of the update."""
    for number in range(first, first + count):
        tokens = torch.arange(8).add(number) % 5
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(tokens).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_is_torchs_muon_for_matrices_and_adamw_for_the_others() -> None:
    plain, ours, resumed = muon_model(), muon_model(), muon_model()
    named = dict(plain.named_parameters())
    matrices = [named["1.weight"], named["3.weight"]]
    others = [named[name] for name in ("0.weight", "1.bias", "3.bias")]
    both = [Muon(matrices, 0.01, 0.1, adjust_lr_fn="match_rms_adamw"), AdamW(others, 0.01, weight_decay=0.1)]

    def made(model: nn.Module) -> tuple[Optimizer, dict[str, nn.Parameter]]:
        names = dict(model.named_parameters())
        build = muon(0.01, adamw_names=["0."])
        return build([*model.parameters()], StageInfo(named_parameters=tuple(names.items()))), names

    optimizer, names = made(ours)
    expected = updates(plain, both, 0, 6)
    updates(ours, [optimizer], 0, 3)
    content, tensors = optimizer_state(optimizer, names)
    resumed.load_state_dict(ours.state_dict())
    other, other_names = made(resumed)
    load_optimizer(other, other_names, content, lambda wanted: {name: tensors[name].clone() for name in wanted}, "here")
    for model, own in ((ours, optimizer), (resumed, other)):
        assert all(map(torch.equal, updates(model, [own], 3, 3), expected))


def test_muon_where_a_stage_has_no_matrix_or_nothing_else() -> None:
    for parameter, expected in ((nn.Parameter(torch.ones(2)), "betas"), (nn.Parameter(torch.eye(2)), "ns_steps")):
        (group,) = muon(0.5)([parameter]).param_groups
        assert (group["lr"], expected in group) == (0.5, True)


def test_muon_refuses_names_that_it_cannot_use() -> None:
    with pytest.raises(LaunchError, match="adamw_names is a list of parts of names"):
        muon(adamw_names="embed")
    with pytest.raises(LaunchError, match="needs the names of parameters"):
        muon(adamw_names=["embed"])([nn.Parameter(torch.eye(2))])
