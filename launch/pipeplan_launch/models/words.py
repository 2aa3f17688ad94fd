"""Loss and measure of models that predict a word at every place of a padded sentence."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3
FIRST_WORD = 4
"""Ids below it are the four marks above."""


def loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross entropy per place, nought where the target is padded: `scores` samples × places × vocabulary.

    Not per word: then the mean over minibatches of equal size is that over all their samples.
    """
    total = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    return total / target.numel()


def right(scores: Tensor, target: Tensor) -> Tensor:
    """The part of each target's words that are right, summed over the samples."""
    words = target != PAD
    hits = (scores.argmax(dim=2) == target) & words
    return (hits.sum(dim=1) / words.sum(dim=1)).sum()
