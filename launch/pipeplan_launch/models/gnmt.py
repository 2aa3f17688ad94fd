"""GNMT (Wu et al., 2016): an encoder and a decoder of LSTM layers with residual connections and attention.

It has the shape of PipeDream's published profiles. Unlike in the paper, the query of the attention is the output of
the decoder's first layer at the same step, not at the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import FIRST_WORD, PAD, generated_text, right_words, sentence_pair, text_loss

DROPOUT = 0.2
INITIAL_RANGE = 0.04
"""Parameters start uniformly distributed between minus and plus this value (Wu et al.)."""


@dataclass(frozen=True)
class GNMTSize:
    """Number of layers, lengths and widths of a GNMT."""

    layers: int
    """LSTM layers of the encoder, and of the decoder."""
    source: int
    """Tokens in a padded source sentence."""
    target: int
    """Tokens in a padded target sentence."""
    vocabulary: int = 32_320
    width: int = 1024


GNMT8 = GNMTSize(layers=4, source=48, target=47)
GNMT16 = GNMTSize(layers=8, source=25, target=25)


class Encoder(nn.Module):
    """A bidirectional LSTM, then unidirectional LSTMs. All unidirectional LSTMs but the first have residuals."""

    def __init__(self, size: GNMTSize) -> None:
        super().__init__()
        width = size.width
        self.embedding = nn.Embedding(size.vocabulary, width, padding_idx=PAD)
        self.bidirectional = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        widths = [2 * width] + [width] * (size.layers - 2)
        self.lstms = nn.ModuleList(nn.LSTM(inputs, width, batch_first=True) for inputs in widths)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, source: Tensor) -> Tensor:
        """States of samples × length × width for token ids of samples × length."""
        x, _ = self.bidirectional(self.embedding(source))
        x, _ = self.lstms[0](self.dropout(x))
        for lstm in self.lstms[1:]:
            out, _ = lstm(self.dropout(x))
            x = out + x
        states: Tensor = x
        return states


class Attention(nn.Module):
    """Additive attention (Bahdanau et al., 2015) over the source's words: v · tanh(Q query + K key)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(width, width))
        self.key = nn.Parameter(torch.empty(width, width))
        self.v = nn.Parameter(torch.empty(width))

    def forward(self, queries: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """For every query (samples × target × width) the mean of the encoder's states weighted by attention."""
        queried = functional.linear(queries, self.query).unsqueeze(2)
        keys = functional.linear(states, self.key).unsqueeze(1)
        scores = torch.tanh(queried + keys) @ self.v
        positions = torch.arange(states.shape[1], device=states.device)
        padding = positions >= lengths.unsqueeze(1)
        weights = scores.masked_fill(padding.unsqueeze(1), float("-inf")).softmax(dim=2)
        return weights @ states


class Decoder(nn.Module):
    """An LSTM over the target so far, attention from it to the source, and LSTMs that read both."""

    def __init__(self, size: GNMTSize) -> None:
        super().__init__()
        width = size.width
        self.embedding = nn.Embedding(size.vocabulary, width, padding_idx=PAD)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = Attention(width)
        self.lstms = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(size.layers - 1))
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(width, size.vocabulary)

    def forward(self, target: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """Scores of samples × length × vocabulary for the word after each word of the target."""
        x, _ = self.first(self.embedding(target))
        attended = self.attention(x, states, lengths)
        x, _ = self.lstms[0](torch.cat([self.dropout(x), attended], dim=2))
        for lstm in self.lstms[1:]:
            out, _ = lstm(torch.cat([self.dropout(x), attended], dim=2))
            x = out + x
        scores: Tensor = self.classifier(x)
        return scores


class GNMT(nn.Module):
    """The whole model, with the true target so far as the decoder's input (teacher forcing)."""

    def __init__(self, size: GNMTSize) -> None:
        super().__init__()
        self.encoder = Encoder(size)
        self.decoder = Decoder(size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -INITIAL_RANGE, INITIAL_RANGE)
        for embedding in (self.encoder.embedding, self.decoder.embedding):
            nn.init.zeros_(embedding.weight[PAD])

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Scores for the next word at each position of `target`. `lengths`: number of words in each source sentence."""
        scores: Tensor = self.decoder(target, self.encoder(source), lengths)
        return scores


def gnmt_inputs(size: GNMTSize, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs for n pairs of sentences of full length."""
    source = torch.randint(FIRST_WORD, size.vocabulary, (n, size.source))
    return source, torch.full((n,), size.source), torch.randint(FIRST_WORD, size.vocabulary, (n, size.target))


def gnmt_job(size: GNMTSize, name: str) -> Job:
    """A job with Adam and clipping as in PipeDream and GNMT, on generated pairs of sentences."""
    return Job(
        GNMT(size),
        inputs=lambda n: gnmt_inputs(size, n),
        loss=text_loss,
        data=lambda: generated_text(partial(sentence_pair, size.source, size.target, size.vocabulary)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-4),
        clip_norm=5.0,
        metric=right_words,
        name=name,
        minibatch=64,
    )


def gnmt8() -> Job:
    """The job with 4 + 4 LSTM layers."""
    return gnmt_job(GNMT8, "gnmt8")


def gnmt16() -> Job:
    """The job with 8 + 8 LSTM layers."""
    return gnmt_job(GNMT16, "gnmt16")
