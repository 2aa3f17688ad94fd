"""AWD-LM (Merity, Keskar and Socher, 2018): an LSTM language model with dropout on its recurrent weights.

Dropout rates of embedding, LSTMs and decoder are the paper's for the Penn Treebank. Averaged SGD, windows of random
length and activation penalties are left out. The LSTM state is zero at the start of every window, because a pipeline
does not run the windows of one text in order on one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import FIRST_WORD, generated_text, right_words, text_loss, text_window

WORD_DROP, INPUT_DROP, HIDDEN_DROP, OUTPUT_DROP, WEIGHT_DROP = 0.1, 0.4, 0.3, 0.4, 0.5


@dataclass(frozen=True)
class AWDLMSize:
    """Widths and lengths. The last LSTM is as wide as the embedding."""

    embedding: int
    hidden: int
    layers: int
    tied: bool
    """Whether the decoder shares the embedding's weights. The two layers, and everything between them, must then be in
    one stage."""
    vocabulary: int = 10_000
    length: int = 70
    """Words in a window."""


PIPEDREAM = AWDLMSize(embedding=1500, hidden=1500, layers=4, tied=False)
PAPER = AWDLMSize(embedding=400, hidden=1150, layers=3, tied=True)


class WordDropEmbedding(nn.Embedding):
    """An embedding that drops whole words, the same words in the whole minibatch."""

    def forward(self, input: Tensor) -> Tensor:
        """Vectors for ids of any shape."""
        kept = functional.dropout(self.weight.new_ones(self.num_embeddings, 1), WORD_DROP, self.training)
        return functional.embedding(input, self.weight) * functional.embedding(input, kept)


class LockedDropout(nn.Module):
    """Dropout of the same elements at every position of a sequence (Gal and Ghahramani, 2016)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """The input with dropout, samples × length × width."""
        return x * functional.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p, self.training)


class WeightDropLSTM(nn.LSTM):
    """One LSTM layer with DropConnect on its hidden-to-hidden weights, drawn once for a whole sequence."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(inputs, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Outputs of samples × length × hidden for inputs of samples × length × inputs, starting from a zero state."""
        recurrent = functional.dropout(self.weight_hh_l0, WEIGHT_DROP, self.training)
        state = x.new_zeros(1, x.shape[0], self.hidden_size)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        out, _, _ = torch.lstm(x, [state, state], weights, True, 1, 0.0, self.training, False, True)
        return out


class AWDLM(nn.Module):
    """Scores for the next word at each position of a window."""

    def __init__(self, size: AWDLMSize) -> None:
        super().__init__()
        widths = [size.embedding] + [size.hidden] * (size.layers - 1) + [size.embedding]
        self.embedding = WordDropEmbedding(size.vocabulary, size.embedding)
        self.drop = LockedDropout(INPUT_DROP)
        self.lstms = nn.ModuleList(WeightDropLSTM(inputs, outputs) for inputs, outputs in pairwise(widths))
        self.drops = nn.ModuleList(
            LockedDropout(HIDDEN_DROP if layer < size.layers - 1 else OUTPUT_DROP) for layer in range(size.layers)
        )
        self.decoder = nn.Linear(size.embedding, size.vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        if size.tied:
            self.decoder.weight = self.embedding.weight
        else:
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of samples × length × vocabulary for ids of samples × length."""
        x = self.drop(self.embedding(text))
        for lstm, drop in zip(self.lstms, self.drops, strict=True):
            x = drop(lstm(x))
        scores: Tensor = self.decoder(x)
        return scores


def awd_lm_job(size: AWDLMSize, name: str, minibatch: int) -> Job:
    """A job with the learning rate, weight decay and clipping of the authors' code, on generated text."""
    return Job(
        AWDLM(size),
        inputs=lambda n: torch.randint(FIRST_WORD, size.vocabulary, (n, size.length)),
        loss=text_loss,
        data=lambda: generated_text(partial(text_window, size.length, size.vocabulary)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=30.0, weight_decay=1.2e-6),
        clip_norm=0.25,
        metric=right_words,
        name=name,
        minibatch=minibatch,
    )


def build() -> Job:
    """The job in the size of PipeDream's paper."""
    return awd_lm_job(PIPEDREAM, "awd-lm", minibatch=80)


def paper() -> Job:
    """The job in the size of Merity et al., with tied weights: `pipeplan_launch.models.awd_lm:paper`."""
    return awd_lm_job(PAPER, "awd-lm-paper", minibatch=40)
