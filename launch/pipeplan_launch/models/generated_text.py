"""Generated sentences for models of language: ids of the right vocabulary, as frequent as words are (Zipf's law)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from pipeplan_launch.job import Data
from pipeplan_launch.models.words import BEGIN, END, FIRST_WORD, PAD


class Generated(Dataset[Any]):
    """Samples that are each made from their own random numbers when they are asked for."""

    def __init__(self, samples: int, make: Callable[[torch.Generator], Any], seed: int) -> None:
        self.samples, self.make, self.seed = samples, make, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.make(torch.Generator().manual_seed(self.seed * 1_000_003 + index))


def generated(make: Callable[[torch.Generator], Any], samples: int = 1024) -> Data:
    """A training set of that many samples and a test set of a quarter of it."""
    return Data(Generated(samples, make, seed=1), Generated(max(1, samples // 4), make, seed=2))


def words(count: int, vocabulary: int, chance: torch.Generator) -> Tensor:
    """Ids of so many words: the logarithm of a word's rank is uniform, so that its frequency falls as 1 / rank."""
    rank = (vocabulary - FIRST_WORD + 1) ** torch.rand(count, generator=chance, dtype=torch.float64)
    return FIRST_WORD - 1 + rank.long()


def between(low: int, high: int, chance: torch.Generator) -> int:
    """A whole number from `low` to `high`, both included."""
    return int(torch.randint(low, high + 1, (), generator=chance))


def pair(
    source: int, target: int, vocabulary: int, chance: torch.Generator
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """A sentence and its "translation", the same words with every id moved on by one, padded to these lengths.

    ((source, its length, target from BEGIN on), target up to END). Sources fill from half of their room to all of it.
    """
    length = between(max(1, source // 2), source, chance)
    said = words(length, vocabulary, chance)
    translated = (said - FIRST_WORD + 1) % (vocabulary - FIRST_WORD) + FIRST_WORD
    sentence = torch.cat([torch.tensor([BEGIN]), translated[: target - 1], torch.tensor([END])])
    inputs = (padded(said, source), torch.tensor(length), padded(sentence[:-1], target))
    return inputs, padded(sentence[1:], target)


def window(length: int, vocabulary: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """(a piece of text, the same piece one word later)."""
    text = words(length + 1, vocabulary, chance)
    return text[:-1], text[1:]


def padded(ids: Tensor, length: int, before: int = 0) -> Tensor:
    """The ids after so many PADs, with more to the end."""
    return functional.pad(ids, (before, length - before - len(ids)), value=PAD)
