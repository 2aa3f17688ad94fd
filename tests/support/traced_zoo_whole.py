"""Models that torch.export cannot trace all of, and one whose gradients it would lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch import Job


class Skips(nn.Module):
    """A residual block that is left out now and then: stochastic depth as it is often written."""

    def __init__(self, width: int, chance: float) -> None:
        super().__init__()
        self.conv, self.norm, self.chance = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), chance

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < self.chance:
            return x
        return x + torch.relu(self.norm(self.conv(x)))


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(Skips(4, 0.2 * number) for number in range(4)))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class Router(nn.Module):
    """Sends every token to one expert, which computes on as many as there are, and counts them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("load", torch.zeros(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0, *, rows: int) -> dict[str, Tensor]:
        flat = x.reshape(rows, -1)
        weight, chosen = self.gate(flat).softmax(dim=-1).max(dim=-1)
        made = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            tokens = (chosen == index).nonzero()[:, 0]
            if len(tokens) > 0:
                made = made.index_add(0, tokens, self.dropout(expert(flat[tokens])) * weight[tokens, None] * scale)
        if self.training:
            self.load = self.load * 0.9 + torch.bincount(chosen, minlength=3)
        return {"tokens": made.view_as(x), "chosen": chosen}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), Router(width)

    def forward(self, x: Tensor) -> Tensor:
        routed = self.router(self.norm(x), 0.5, rows=x.shape[0] * x.shape[1])
        return x + routed["tokens"] + routed["chosen"].view(x.shape[:2]).unsqueeze(-1)


class Routed(nn.Module):
    """Experts that get only their own tokens, in three blocks, the last of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[-1]):
            x = block(x)
        return self.last(x)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.scale * gradients[0], None


class Sign(torch.autograd.Function):
    """A step whose gradient passes straight through where the input is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.sign(), x.abs().max()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1) + gradients[1]


class Adversary(nn.Module):
    """Two heads, one of which trains the trunk against itself, and gradients that the user wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.label, self.domain = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        trunk = self.trunk(x)
        signs, most = Sign.apply(trunk)
        return self.label(signs + most), self.domain(Reverse.apply(trunk, 0.3))


class Hooked(nn.Module):
    """A part that clips its own gradient by a hook on a tensor, between two others."""

    class Clips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
            return torch.tanh(y)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.clips, self.last = nn.Linear(3, 4), self.Clips(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.clips(self.first(x)))


@dataclass
class Heads:
    scores: Tensor
    features: tuple[Tensor, Tensor]
    comment: str | None = None


class ReturnsDataclass(nn.Module):
    """A plain dataclass, of which torch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.dropout, self.head = nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Heads:
        y = self.dropout(functional.gelu(self.body(x)))
        return Heads(self.head(y), (y, y * 2))


class Cache:
    def __init__(self, kept: list[Tensor]) -> None:
        self.kept = kept


class ReturnsCache(nn.Module):
    """An object that only a later call needs, beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, *, left: Tensor, also: Tensor) -> dict[str, Any]:
        y = self.body(left) - self.body(also)
        return {"scores": self.head(y), "cache": Cache([y])}


class FrozenBackbone(nn.Module):
    """A backbone that is not trained and stays in evaluation mode, under a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))
        self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def _mean(output: Any, target: Any) -> Tensor:
    return output.square().mean()


def _first(output: Any, target: Any) -> Tensor:
    return sum((one.square().mean() for one in output), start=torch.zeros(()))


ZOO = {
    "stochastic-depth": lambda: Job(StochasticDepth(), inputs=lambda n: torch.randn(n, 3, 6, 6), loss=_mean),
    "routed": lambda: Job(Routed(), inputs=lambda n: torch.randn(n, 4, 5), loss=_mean),
    "adversary": lambda: Job(Adversary(), inputs=lambda n: torch.randn(n, 4), loss=_first),
    "hooked": lambda: Job(Hooked(), inputs=lambda n: torch.randn(n, 3), loss=_mean),
    "dataclass": lambda: Job(
        ReturnsDataclass(),
        inputs=lambda n: torch.randn(n, 4),
        loss=lambda output, target: _mean(output.scores, target) + _first(output.features, target),
    ),
    "cache": lambda: Job(
        ReturnsCache(),
        inputs=lambda n: {"also": torch.randn(n, 4), "left": torch.randn(n, 4)},
        loss=lambda output, target: _mean(output["scores"], target),
    ),
    "frozen-backbone": lambda: Job(FrozenBackbone(), inputs=lambda n: torch.randn(n, 3, 6, 6), loss=_mean),
}


def build(name: str) -> Job:
    """The model of that name, with the same weights every time."""
    torch.manual_seed(0)
    return ZOO[name]()
