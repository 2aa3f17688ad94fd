"""Synthetic data for models whose real data is too large to ship: the right shapes and sizes, but nothing to learn.

Words are ids of the right vocabulary with frequencies as in natural language (Zipf's law).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from pipeplan_launch.job.job import Data


class GeneratedSamples(Dataset[Any]):
    """Samples that are made on access, each from random numbers seeded by its index."""

    def __init__(self, samples: int, make: Callable[[int, torch.Generator], Any], seed: int) -> None:
        """`make`: makes a sample from its index and its random generator."""
        self.samples, self.make, self.seed = samples, make, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.make(index, torch.Generator().manual_seed(self.seed * 1_000_003 + index))


def generated_data(make: Callable[[int, torch.Generator], Any], samples: int) -> Data:
    """A training set of this many samples, and a test set that is a quarter as large."""
    return Data(GeneratedSamples(samples, make, seed=1), GeneratedSamples(max(1, samples // 4), make, seed=2))


def generated_images(shape: tuple[int, ...], classes: int, samples: int = 512) -> Data:
    """Images of normal noise. The class of an image depends on its index."""

    def image(index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(shape, generator=generator), torch.tensor(index % classes)

    return generated_data(image, samples)


def generated_text(make: Callable[[torch.Generator], Any], samples: int = 1024) -> Data:
    """Sentences or other samples that `make` draws from a random generator."""
    return generated_data(lambda _, generator: make(generator), samples)


def zipf_words(count: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Ids of this many words. The logarithm of a word's rank is uniform, so its frequency falls as 1 / rank."""
    rank = (vocabulary - FIRST_WORD + 1) ** torch.rand(count, generator=generator, dtype=torch.float64)
    return FIRST_WORD - 1 + rank.long()


def random_between(low: int, high: int, generator: torch.Generator) -> int:
    """A random whole number from `low` to `high`, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def sentence_pair(
    source: int, target: int, vocabulary: int, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """A sentence and its "translation", the same words with every id increased by one, padded to these lengths.

    Returns ((source, its length, target with BEGIN before it), target with END after it). The words of a source
    sentence fill at least half of its padded length.
    """
    length = random_between(max(1, source // 2), source, generator)
    original = zipf_words(length, vocabulary, generator)
    translated = (original - FIRST_WORD + 1) % (vocabulary - FIRST_WORD) + FIRST_WORD
    sentence = torch.cat([torch.tensor([BEGIN]), translated[: target - 1], torch.tensor([END])])
    inputs = (pad_ids(original, source), torch.tensor(length), pad_ids(sentence[:-1], target))
    return inputs, pad_ids(sentence[1:], target)


def text_window(length: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(a window of text, the same window one word later)."""
    text = zipf_words(length + 1, vocabulary, generator)
    return text[:-1], text[1:]


def pad_ids(ids: Tensor, length: int, before: int = 0) -> Tensor:
    """The ids after `before` PADs, followed by PADs up to `length`."""
    return functional.pad(ids, (before, length - before - len(ids)), value=PAD)


# Loss and metric of models that predict a word at every position of a padded sentence.

PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3
FIRST_WORD = 4
"""Smaller ids are the four markers above."""


def text_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross entropy per position, 0 at padded positions. `scores`: samples × positions × vocabulary.

    It is not a mean over words, so that the mean over minibatches of equal size is the mean over all their samples.
    """
    total = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    return total / target.numel()


def right_words(scores: Tensor, target: Tensor) -> Tensor:
    """The share of right words in each target, summed over the samples."""
    words = target != PAD
    hits = (scores.argmax(dim=2) == target) & words
    return (hits.sum(dim=1) / words.sum(dim=1)).sum()
