"""Small networks of the usual kinds: long skips, experts, recurrence by hand, reparametrised weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def _block(channels: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU(inplace=True))


class UNet(nn.Module):
    """Two levels down and up, with the skips across."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _block(3, 4), _block(4, 8), _block(8, 8)
        self.up2, self.up1, self.out = _block(16, 4), _block(8, 4), nn.Conv2d(4, 2, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        x = functional.interpolate(self.bottom(self.pool(coarse)), scale_factor=2)
        x = functional.interpolate(self.up2(torch.cat([x, coarse], dim=1)), scale_factor=2)
        return self.out(self.up1(torch.cat([x, fine], dim=1)))


class Experts(nn.Module):
    """Three experts of which two count for each token, summed up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(6, 3), nn.LayerNorm(6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            total += (weight * (chosen == index)).sum(dim=-1, keepdim=True) * expert(x)
        return self.norm(total + x)


class Cells(nn.Module):
    """A GRU over time-major inputs, a cell called by hand, and every kind of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, num_layers=2, dropout=0.3)
        self.cell, self.last = nn.LSTMCell(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.gru(x)
        state = (last[0], last[1])
        for step in range(3):
            state = self.cell(y[step], state)
        z = self.last(state[0])
        z.clamp_(min=-0.5)
        z.add_(1).mul_(2)
        z = functional.rrelu(z, training=self.training)
        z = functional.alpha_dropout(z, 0.2, self.training)
        return functional.feature_alpha_dropout(z, 0.2, self.training)


class Reparametrised(nn.Module):
    """Weight norm, norms with and without running statistics, a parameter read in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.linear, self.own = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.batch = nn.BatchNorm1d(4, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.linear(functional.elu(self.normed(x), inplace=True)) @ self.own.t())
        return self.instance(y.unsqueeze(-1).expand(-1, -1, 3) * self.own[0].view(1, 4, 1)).sum(dim=-1)
