"""Loss and metric of models that predict a word at every position of a padded sentence."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

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
