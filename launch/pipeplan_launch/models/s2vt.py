"""S2VT (Venugopalan et al., 2015): video to text with one pair of LSTMs that first read frames and then write words.

Both LSTMs run over the same 80 steps: first frames without words, then words without frames. So the data determines
where a video ends and its sentence begins. Frames are represented by their features from VGG-16's layer fc7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import (
    BEGIN,
    END,
    FIRST_WORD,
    PAD,
    generated_text,
    pad_ids,
    random_between,
    right_words,
    text_loss,
    zipf_words,
)

INITIAL_RANGE = 0.08
"""LSTMs, embedding and output layer start uniformly distributed between minus and plus this value, as in the authors'
code."""


@dataclass(frozen=True)
class S2VTSize:
    """The paper's sizes, with the vocabulary of the authors' published model."""

    steps: int = 80
    features: int = 4096
    embedding: int = 500
    hidden: int = 1000
    vocabulary: int = 46_168


class S2VT(nn.Module):
    """An LSTM over frames, and an LSTM over the output of the first LSTM and the words so far."""

    def __init__(self, size: S2VTSize) -> None:
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
                    nn.init.uniform_(parameter, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.zeros_(self.word.weight[PAD])

    def forward(self, frames: Tensor, previous: Tensor) -> Tensor:
        """Scores of samples × steps × vocabulary for the next word.

        `frames`: samples × steps × features, zeros at steps without a frame. `previous`: ids of samples × steps, the
        previous word at each step, PAD at steps without a word.
        """
        seen, _ = self.video(self.frame(frames))
        written, _ = self.language(torch.cat([seen, self.word(previous)], dim=2))
        scores: Tensor = self.predict(written)
        return scores


def video_sample(size: S2VTSize, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A generated video with its sentence: ((frames, words with BEGIN before them), words with END after them), each
    over all steps.

    Frames fill a quarter to three quarters of the steps, and words at most a quarter.
    """
    frames = random_between(size.steps // 4, size.steps * 3 // 4, generator)
    sentence = zipf_words(random_between(1, size.steps // 4 - 1, generator), size.vocabulary, generator)
    features = torch.zeros(size.steps, size.features)
    features[:frames] = torch.randn(frames, size.features, generator=generator).relu_()
    sentence_input = torch.cat([torch.tensor([BEGIN]), sentence])
    target = torch.cat([sentence, torch.tensor([END])])
    return (features, pad_ids(sentence_input, size.steps, frames)), pad_ids(target, size.steps, frames)


def s2vt_inputs(size: S2VTSize, n: int) -> tuple[Tensor, Tensor]:
    """Inputs with a frame and a word at every step."""
    return torch.randn(n, size.steps, size.features), torch.randint(FIRST_WORD, size.vocabulary, (n, size.steps))


def s2vt_job(size: S2VTSize, name: str) -> Job:
    """A job with cross entropy over the words alone and SGD with momentum, on generated videos."""
    return Job(
        S2VT(size),
        inputs=lambda n: s2vt_inputs(size, n),
        loss=text_loss,
        data=lambda: generated_text(partial(video_sample, size), samples=512),
        clip_norm=10.0,
        metric=right_words,
        name=name,
        minibatch=80,
    )


def build() -> Job:
    """The job in its full size."""
    return s2vt_job(S2VTSize(), "s2vt")
