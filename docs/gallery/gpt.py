"""A GPT over characters, on the text of Python's own documentation.

`pipeplan profile gpt.py:job` measures it.
"""

import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

LENGTH = 32
"""Characters that the model reads at once."""
CHARACTERS = 48_000
EPOCHS = 3


class Block(nn.Module):
    """Causal self-attention, then two linear layers, each with a norm before it and a shortcut around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Scores for the character after each of the characters so far."""

    def __init__(self, vocabulary: int, length: int, width: int, blocks: int, heads: int, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.head.weight, std=0.02)
            self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def documentation() -> tuple[Tensor, str]:
    """The text as character numbers, and the vocabulary: the characters by number."""
    text = "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    vocabulary = "".join(sorted(set(text)))
    return torch.tensor([vocabulary.index(character) for character in text]), vocabulary


def windows() -> Data:
    """Windows of 33 characters: the model reads the first 32 and predicts the last 32. Every tenth is for testing."""
    text, _ = documentation()
    cut = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    tested = torch.arange(len(cut)) % 10 == 0
    train, test = cut[~tested], cut[tested]
    return Data(TensorDataset(train[:, :-1], train[:, 1:]), TensorDataset(test[:, :-1], test[:, 1:]))


def loss(scores: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def foretold(scores: Tensor, following: Tensor) -> Tensor:
    """The number of correct samples, where each sample counts by its share of correct characters."""
    return (scores.argmax(-1) == following).float().mean(1).sum()


def adamw(parameters, stage):
    """AdamW for the parameters of one stage, with weight decay for matrices but not for norms and biases."""
    matrices = [one for _, one in stage.named_parameters if one.ndim > 1]
    others = [one for _, one in stage.named_parameters if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def warm_up(optimizer):
    """A rate that grows over 100 minibatches and then falls along a cosine."""
    end = 327 * EPOCHS

    def rate(minibatch: int) -> float:
        done = (minibatch - 100) / (end - 100)
        return (minibatch + 1) / 100 if done < 0 else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def job() -> Job:
    _, vocabulary = documentation()
    return Job(
        model=GPT(len(vocabulary), LENGTH, width=64, blocks=3, heads=4),
        loss=loss,
        data=windows,
        optimizer=adamw,
        scheduler=warm_up,
        scheduler_interval="minibatch",
        clip_norm=1.0,
        metric=foretold,
        name="gpt",
        minibatch=4,
    )


def gpt2(tied: bool = False) -> Job:
    """The smallest GPT-2, for planning only: it has shapes but no data."""
    return Job(
        model=GPT(50_257, 1024, width=768, blocks=12, heads=12, tied=tied),
        inputs=lambda n: torch.zeros(n, 1024, dtype=torch.int64),
        loss=loss,
        optimizer=adamw,
        name="gpt2",
        minibatch=4,
    )


def gpt2_tied() -> Job:
    """GPT-2 with one matrix for the embedding and the output layer, like the original."""
    return gpt2(tied=True)
