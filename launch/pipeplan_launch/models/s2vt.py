"""S2VT (Venugopalan et al., 2015): video to text, by one pair of LSTMs that first see frames and then say words.

Both run over the same 80 steps: frames first, with no words, then words, with no frames. So where a video ends and its
sentence begins is the data's to say. Frames are given as the features that VGG-16's layer fc7 has of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeplan_launch.job import Job
from pipeplan_launch.models.generated_text import between, generated, padded, words
from pipeplan_launch.models.words import BEGIN, END, FIRST_WORD, PAD, loss, right

INITIAL = 0.08
"""LSTMs, words and scores begin uniformly between minus this and this, as in the authors' code."""


@dataclass(frozen=True)
class Size:
    """The paper's, but for the vocabulary, which is that of the authors' published model."""

    steps: int = 80
    features: int = 4096
    embedding: int = 500
    hidden: int = 1000
    vocabulary: int = 46_168


class S2VT(nn.Module):
    """An LSTM over frames, and one over what it says and the words so far."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.frame = nn.Linear(size.features, size.embedding)
        self.word = nn.Embedding(size.vocabulary, size.embedding, padding_idx=PAD)
        self.video = nn.LSTM(size.embedding, size.hidden, batch_first=True)
        self.language = nn.LSTM(size.hidden + size.embedding, size.hidden, batch_first=True)
        self.predict = nn.Linear(size.hidden, size.vocabulary)
        for module in (self.word, self.video, self.language, self.predict):
            for name, parameter in module.named_parameters():
                if "bias" in name:
                    nn.init.zeros_(parameter)
                else:
                    nn.init.uniform_(parameter, -INITIAL, INITIAL)
        nn.init.zeros_(self.word.weight[PAD])

    def forward(self, frames: Tensor, said: Tensor) -> Tensor:
        """Scores of samples × steps × vocabulary for the next word.

        `frames`: samples × steps × features, noughts where there is no frame; `said`: ids of samples × steps, the word
        before in each step, PAD where none is due.
        """
        seen, _ = self.video(self.frame(frames))
        told, _ = self.language(torch.cat([seen, self.word(said)], dim=2))
        scores: Tensor = self.predict(told)
        return scores


def clip(size: Size, chance: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A generated video and its sentence: ((frames, words from BEGIN on), words up to END), over all of the steps.

    From a quarter of the steps to three quarters are frames, at most a quarter words.
    """
    frames = between(size.steps // 4, size.steps * 3 // 4, chance)
    sentence = words(between(1, size.steps // 4 - 1, chance), size.vocabulary, chance)
    features = torch.zeros(size.steps, size.features)
    features[:frames] = torch.randn(frames, size.features, generator=chance).relu_()
    said = torch.cat([torch.tensor([BEGIN]), sentence])
    target = torch.cat([sentence, torch.tensor([END])])
    return (features, padded(said, size.steps, frames)), padded(target, size.steps, frames)


def example(size: Size, n: int) -> tuple[Tensor, Tensor]:
    """Inputs with a frame and a word in every step."""
    return torch.randn(n, size.steps, size.features), torch.randint(FIRST_WORD, size.vocabulary, (n, size.steps))


def job(size: Size, name: str) -> Job:
    """Cross entropy of the words alone, SGD with momentum, on generated videos."""
    return Job(
        S2VT(size),
        inputs=lambda n: example(size, n),
        loss=loss,
        data=lambda: generated(partial(clip, size), samples=512),
        clip_norm=10.0,
        metric=right,
        name=name,
        minibatch=80,
    )


def build() -> Job:
    """The job, in its full size."""
    return job(Size(), "s2vt")
