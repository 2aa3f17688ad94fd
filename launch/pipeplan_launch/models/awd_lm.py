"""AWD-LM (Merity, Keskar and Socher, 2018): a language model of LSTMs whose recurrent weights drop out.

Embedding, LSTM and decoder drop as the paper has it on the Penn Treebank. Of its training, averaged SGD, windows of
random length and the penalties on activations are left out, and the state is nought at the start of every window: in a
pipeline the windows of one text are not all at one worker, nor one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch.job import Job
from pipeplan_launch.models.generated_text import generated, window
from pipeplan_launch.models.words import FIRST_WORD, loss, right

WORD_DROP, INPUT_DROP, HIDDEN_DROP, OUTPUT_DROP, WEIGHT_DROP = 0.1, 0.4, 0.3, 0.4, 0.5


@dataclass(frozen=True)
class Size:
    """Widths and lengths; the last LSTM is as wide as the embedding."""

    embedding: int
    hidden: int
    layers: int
    tied: bool
    """Whether the decoder's weights are the embedding's: then both must share a stage, and so must all between."""
    vocabulary: int = 10_000
    length: int = 70
    """Words in a window."""


PIPEDREAM = Size(embedding=1500, hidden=1500, layers=4, tied=False)
PAPER = Size(embedding=400, hidden=1150, layers=3, tied=True)


class WordDropEmbedding(nn.Embedding):
    """An embedding from which whole words drop, everywhere in a minibatch."""

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape to vectors."""
        kept = functional.dropout(self.weight.new_ones(self.num_embeddings, 1), WORD_DROP, self.training)
        return functional.embedding(input, self.weight) * functional.embedding(input, kept)


class LockedDropout(nn.Module):
    """Dropout of the same elements at every place of a sequence (Gal and Ghahramani, 2016)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Samples × length × width, and the same."""
        return x * functional.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p, self.training)


class WeightDropLSTM(nn.LSTM):
    """One layer of LSTM with DropConnect on its hidden-to-hidden weights: one draw for a whole sequence."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(inputs, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Samples × length × inputs to samples × length × hidden, from a state of noughts."""
        recurrent = functional.dropout(self.weight_hh_l0, WEIGHT_DROP, self.training)
        state = x.new_zeros(1, x.shape[0], self.hidden_size)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        out, _, _ = torch.lstm(x, [state, state], weights, True, 1, 0.0, self.training, False, True)
        return out


class AWDLM(nn.Module):
    """Scores for the next word at each place of a window."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths = [size.embedding] + [size.hidden] * (size.layers - 1) + [size.embedding]
        self.embedding = WordDropEmbedding(size.vocabulary, size.embedding)
        self.drop = LockedDropout(INPUT_DROP)
        self.lstms = nn.ModuleList(WeightDropLSTM(one, other) for one, other in pairwise(widths))
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
        """Ids of samples × length to scores of samples × length × vocabulary."""
        x = self.drop(self.embedding(text))
        for lstm, drop in zip(self.lstms, self.drops, strict=True):
            x = drop(lstm(x))
        scores: Tensor = self.decoder(x)
        return scores


def job(size: Size, name: str, minibatch: int) -> Job:
    """Rate, decay and clipping as in the authors' code, on generated windows."""
    return Job(
        AWDLM(size),
        inputs=lambda n: torch.randint(FIRST_WORD, size.vocabulary, (n, size.length)),
        loss=loss,
        data=lambda: generated(partial(window, size.length, size.vocabulary)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=30.0, weight_decay=1.2e-6),
        clip_norm=0.25,
        metric=right,
        name=name,
        minibatch=minibatch,
    )


def build() -> Job:
    """The job, in the size that PipeDream's paper gives."""
    return job(PIPEDREAM, "awd-lm", minibatch=80)


def paper() -> Job:
    """The job in the size of Merity et al., with tied weights: `pipeplan_launch.models.awd_lm:paper`."""
    return job(PAPER, "awd-lm-paper", minibatch=40)
