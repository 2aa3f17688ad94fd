"""Generated sentences for models of language: token ids of the right vocabulary, lengths as in the real data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeplan_launch.job import Data

PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3
FIRST_WORD = 4
"""Ids below it are the four marks above."""


@dataclass(frozen=True)
class Lengths:
    """The sizes to which sentences are padded, in tokens, and the vocabulary of both languages."""

    source: int
    target: int
    vocabulary: int


def generator(seed: int, index: int) -> torch.Generator:
    """Random numbers that belong to one sample, whoever asks for it and in which order."""
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


class GeneratedPairs(Dataset[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]):
    """Pairs of a sentence and its "translation": the same words, each id moved on by one, in the same order.

    A sample is ((source, length of the source, target from BEGIN on), target up to END). Source sentences fill from
    half of their room to all of it; ids are padded with PAD.
    """

    def __init__(self, samples: int, sizes: Lengths, seed: int) -> None:
        self.samples, self.sizes, self.seed = samples, sizes, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        sizes, chance = self.sizes, generator(self.seed, index)
        length = int(torch.randint(max(1, sizes.source // 2), sizes.source + 1, (), generator=chance))
        words = torch.randint(FIRST_WORD, sizes.vocabulary, (length,), generator=chance)
        translated = (words - FIRST_WORD + 1) % (sizes.vocabulary - FIRST_WORD) + FIRST_WORD
        sentence = torch.cat([torch.tensor([BEGIN]), translated[: sizes.target - 1], torch.tensor([END])])
        inputs = (_padded(words, sizes.source), torch.tensor(length), _padded(sentence[:-1], sizes.target))
        return inputs, _padded(sentence[1:], sizes.target)


def _padded(ids: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, length - len(ids)), value=PAD)


def generated_pairs(sizes: Lengths, samples: int = 1024) -> Data:
    """A training set of that many pairs and a test set of a quarter of it."""
    return Data(
        train=GeneratedPairs(samples, sizes, seed=1),
        test=GeneratedPairs(max(1, samples // 4), sizes, seed=2),
    )
