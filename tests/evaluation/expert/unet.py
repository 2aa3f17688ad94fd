"""A U-Net as latent diffusion trains it: convolutions, and attention to the picture itself and to a text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 320
FACTORS = (1, 2, 4, 4)
"""Channels of each resolution, in multiples of `WIDTH`; all but the last resolution attend."""
BLOCKS = 2
HEADS = 8
TEXT = 768


class Residual(nn.Module):
    """Two convolutions, between which the time is added."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(4 * WIDTH, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(n, inputs, h, w) and (n, 4 * WIDTH) to (n, outputs, h, w)."""
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(hidden)))


class Attention(nn.Module):
    """Attention of a picture's places to themselves or to a text."""

    def __init__(self, width: int, source: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(source, width, bias=False), nn.Linear(source, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """(n, places, width) and (n, words, source) to (n, places, width)."""
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.q(x), self.k(source), self.v(source))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """One transformer block over the places of a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.into, self.out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = Attention(width, width), Attention(width, TEXT)
        self.gated, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """(n, width, h, w) and (n, words, TEXT) to (n, width, h, w)."""
        places = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norms[0](places)
        places = places + self.own(normed, normed)
        places = places + self.text(self.norms[1](places), text)
        value, gate = self.gated(self.norms[2](places)).chunk(2, dim=2)
        places = places + self.down(value * functional.gelu(gate))
        return x + self.out(places.transpose(1, 2).unflatten(2, x.shape[2:]))


class Block(nn.Module):
    """A residual block, with a transformer block where `attends`."""

    def __init__(self, inputs: int, outputs: int, attends: bool) -> None:
        super().__init__()
        self.residual = Residual(inputs, outputs)
        self.transformer = Transformer(outputs) if attends else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, h, w)."""
        x = self.residual(x, time)
        return x if self.transformer is None else self.transformer(x, text)


class UNet(nn.Module):
    """Predicts the noise in latents of 4 channels; each block on the way up reads one of the way down."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * factor for factor in FACTORS]
        self.time = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH))
        self.first = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, width = [WIDTH], WIDTH
        for level, outputs in enumerate(widths):
            for _ in range(BLOCKS):
                self.down.append(Block(width, outputs, level < len(widths) - 1))
                width = outputs
                kept.append(width)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                kept.append(width)
        self.middle = nn.ModuleList([Block(width, width, True), Residual(width, width)])
        for level, outputs in reversed(list(enumerate(widths))):
            for _ in range(BLOCKS + 1):
                self.up.append(Block(width + kept.pop(), outputs, level < len(widths) - 1))
                width = outputs
            if level:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width, 3, padding=1)))
        self.last = nn.Sequential(nn.GroupNorm(32, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, 4, 3, padding=1))

    def forward(self, latents: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """(n, 4, h, w), (n,) and (n, words, TEXT) to (n, 4, h, w)."""
        rates = torch.exp(torch.arange(WIDTH // 2, device=time.device) * (-math.log(10000) / (WIDTH // 2)))
        angles = time[:, None].float() * rates
        when = self.time(torch.cat([angles.cos(), angles.sin()], dim=1))
        x = self.first(latents)
        kept = [x]
        for step in self.down:
            x = step(x, when, text) if isinstance(step, Block) else step(x)
            kept.append(x)
        x = self.middle[1](self.middle[0](x, when, text), when)
        for step in self.up:
            x = step(torch.cat([x, kept.pop()], dim=1), when, text) if isinstance(step, Block) else step(x)
        noise: Tensor = self.last(x)
        return noise
