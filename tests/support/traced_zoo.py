"""Small models that bring, one by one, what makes cutting hard; each function returns a job."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch import Job, load_job


def _job(model: nn.Module, inputs: Any, loss: Any = None) -> Job:
    return Job(model, inputs=inputs, loss=loss or (lambda output, target: output.square().mean()))


def _sum_of(output: Any, target: Any) -> Tensor:
    outputs = output.values() if isinstance(output, dict) else output
    return sum((one.float().square().mean() for one in outputs), start=torch.zeros(()))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))


class TinyGPT(nn.Module):
    """Token and position embeddings, two blocks, and a head that shares the token embedding's weight."""

    def __init__(self, width: int = 16, vocabulary: int = 11) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "attention": Attention(width, 2),
                    "norm2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = x + block["attention"](block["norm1"](x))
            x = x + block["mlp"](block["norm2"](x))
        return self.head(x)


class Translator(nn.Module):
    """An LSTM encoder and decoder with attention: two inputs, a long skip edge, a recurrent state that crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(9, 8), nn.Embedding(7, 8)
        self.encoder = nn.LSTM(8, 12, num_layers=2, batch_first=True, dropout=0.2)
        self.decoder = nn.LSTM(8, 12, num_layers=2, batch_first=True, dropout=0.2)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.out = nn.Linear(24, 7)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, last = self.encoder(self.source(source))
        decoded, _ = self.decoder(self.target(target), last)
        context, _ = self.attention(decoded, states, states, need_weights=False)
        return self.out(torch.cat([decoded, context], dim=-1))


class WritesIntoViews(nn.Module):
    """In-place writes through views, which cannot be written out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x * 2
        left = y[:, :3]
        before = y.sum(dim=1, keepdim=True)
        left += self.second(x)[:, :3]
        y[:, 3] = 0.5
        return self.third(functional.relu_(y + before))


class WritesInPlace(nn.Module):
    """In-place operators whose out-of-place counterparts would have another dtype, or round elsewhere; and writes into
    the minibatch itself, through a view, which is read again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * 1)
        narrow = y.to(torch.bfloat16)
        narrow += x.mean()
        narrow *= y
        x[:, 0] = 1.0
        x *= 2
        count = torch.ones(5, dtype=torch.int64)
        count += 3
        return functional.elu_(self.last(functional.leaky_relu_(narrow.float(), 0.1)) + x) * count


class Routes(nn.Module):
    """Integer tensors made by one layer and read by others far away."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.table = nn.Linear(6, 4), nn.Embedding(4, 6)
        self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        choice = self.score(x).argmax(dim=1)
        positive = x.sum(dim=1, keepdim=True) > 0
        x = torch.tanh(self.middle(x))
        return self.last(torch.where(positive, x, self.table(choice)) + (choice % 2).unsqueeze(1))


class TwoTowers(nn.Module):
    """Two inputs, two branches, a dictionary as output; one member is an input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 5))
        self.right = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Any]:
        left, right = self.left(a), self.right(b)
        return {"product": left * right, "parts": (left, right), "given": b, "nothing": None}


class Regions(nn.Module):
    """Regions without gradients and under autocast, and a literal tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            gate = self.dropout(y.sigmoid()) + torch.ones(6, device=y.device)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.last(y)
        return z.float() * gate * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) / x.shape[0]


class KeepsState(nn.Module):
    """A buffer of its own that forward() writes, read again later; and a constant buffer read in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("scale", torch.arange(1.0, 5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * self.scale)
        self.seen.mul_(0.5).add_(y.detach().mean(dim=0))
        y = functional.relu(y)
        return self.last(y * self.scale) + self.seen


class Shared(nn.Module):
    """One block called twice, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.block, self.norm, self.last = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 2),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        x = self.norm(torch.relu(self.block(x)))
        x = torch.sigmoid(self.block(x))
        return self.last(x)


class OneSize(nn.Module):
    """Holds for one minibatch size only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.each = nn.Parameter(torch.randn(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x) * self.each))


class Wraps(nn.Module):
    """Sizes computed with, outputs that are numbers, tensors of several members, transposed tensors that cross."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        count = x.shape[0]
        y = self.first(x)
        left, right = torch.sigmoid(y).chunk(2, dim=1)
        top, index = torch.topk(left.t() @ right / count, k=2, dim=0)
        y = self.last(left.t().reshape(count, 4) * (count + 1) - top.sum()) + 1.0 / count
        return y, index, top.mT, 3


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


def _tokens(high: int) -> Any:
    return lambda n: torch.randint(0, high, (n, 5))


ZOO = {
    "mnist": lambda: load_job("mnist", 0),
    "resnet-tiny": lambda: load_job("resnet-tiny", 0),
    "gpt": lambda: _job(TinyGPT(), _tokens(11)),
    "translator": lambda: _job(Translator(), lambda n: (torch.randint(0, 9, (n, 5)), torch.randint(0, 7, (n, 4)))),
    "writes-into-views": lambda: _job(WritesIntoViews(), lambda n: torch.randn(n, 6)),
    "writes-in-place": lambda: _job(WritesInPlace(), lambda n: torch.randn(n, 5)),
    "routes": lambda: _job(Routes(), lambda n: torch.randn(n, 6)),
    "two-towers": lambda: _job(
        TwoTowers(),
        lambda n: (torch.randn(n, 4), torch.randn(n, 3)),
        lambda output, target: _sum_of([output["product"], *output["parts"], output["given"]], target),
    ),
    "regions": lambda: _job(Regions(), lambda n: torch.randn(n, 6)),
    "keeps-state": lambda: _job(KeepsState(), lambda n: torch.randn(n, 4)),
    "shared": lambda: _job(Shared(), lambda n: torch.randn(n, 4)),
    "wraps": lambda: _job(Wraps(), lambda n: torch.randn(n, 6), lambda output, target: _sum_of(output[:1], target)),
    "unet": lambda: _job(UNet(), lambda n: torch.randn(n, 3, 8, 8)),
    "experts": lambda: _job(Experts(), lambda n: torch.randn(n, 4, 6)),
    "cells": lambda: _job(Cells(), lambda n: torch.randn(5, n, 4)),
    "reparametrised": lambda: _job(Reparametrised(), lambda n: torch.randn(n, 4)),
    "one-size": lambda: _job(OneSize(), lambda n: torch.randn(n, 4)),
}


def build(name: str) -> Job:
    """The model of that name, with the same weights every time."""
    torch.manual_seed(0)
    return ZOO[name]()
