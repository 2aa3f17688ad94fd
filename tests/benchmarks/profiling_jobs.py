"""Models that profiling.py measures, besides the bundled ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch import Data, Job

VOCABULARY, LENGTH = 10_000, 128


class Block(nn.Module):
    """A decoder block in the order of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Token and position embeddings, blocks, and a head."""

    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) to (batch, length, vocabulary)."""
        x = self.tokens(ids) + self.positions(torch.arange(LENGTH, device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Words(nn.Module):
    """An LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(2000, 256), nn.LSTM(256, 256, 2), nn.Linear(256, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) to (batch, length, 2000)."""
        out, _ = self.lstm(self.tokens(ids).transpose(0, 1))
        scores: Tensor = self.head(out.transpose(0, 1))
        return scores


def _job(model: nn.Module, vocabulary: int, length: int, minibatch: int) -> Job:
    def data() -> Data:
        ids = torch.randint(vocabulary, (256, length + 1))
        return Data([(one[:-1], one[1:]) for one in ids])  # type: ignore[arg-type]

    def loss(output: Tensor, target: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4)

    return Job(model, loss=loss, data=data, optimizer=adam, minibatch=minibatch)


def transformer() -> Job:
    """30 M parameters: 6 blocks of width 512, and embeddings that are not tied."""
    return _job(Decoder(512, 6, 8), VOCABULARY, LENGTH, 8)


def deep() -> Job:
    """24 blocks of width 256."""
    return _job(Decoder(256, 24, 4), VOCABULARY, LENGTH, 4)


def lstm() -> Job:
    """Two layers of 256 over 32 words."""
    return _job(Words(), 2000, 32, 16)
