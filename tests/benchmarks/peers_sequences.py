"""Models of sequences for comparisons with peers, on real text: a language model, and one that translates.

`language` is made like AWD-LM (Merity et al., 2018) in small: three LSTM layers between an embedding and an output
layer, over the characters of Python's own documentation (`pydoc_data.topics`).
`translation` is made like GNMT (Wu et al., 2016) in small: LSTM layers read the source, others write the target with
attention to it. The pairs are English names of languages, scripts, countries and currencies and their German, French
and Italian ones, from the locale data that the package Babel ships; the first character of a source is its language.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from learning_jobs import characters_right
from peers_jobs import digits, loss
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

SEQUENCES_BATCH = 36
"""Samples per update, over all workers."""
CHARACTERS, WINDOW = 64_000, 40
LANGUAGES = ("de", "fr", "it")
LONGEST = 20
"""Characters of a name, at most."""
PADDING, BEGIN = 0, 1
FIRST_CHARACTER = 2


class LanguageModel(nn.Module):
    """Three LSTM layers over characters."""

    def __init__(self, symbols: int, width: int = 128) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.lstm1 = nn.LSTM(width, width, batch_first=True)
        self.lstm2 = nn.LSTM(width, width, batch_first=True)
        self.lstm3 = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        """(samples, characters) integers to scores of the next character, (samples, characters, symbols)."""
        x, _ = self.lstm1(self.symbols(text))
        x, _ = self.lstm2(x)
        x, _ = self.lstm3(x)
        scores: Tensor = self.head(x)
        return scores


class Translator(nn.Module):
    """Two LSTM layers that read the source; two that write the target, with attention between them."""

    def __init__(self, symbols: int, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(symbols, width), nn.Embedding(symbols, width)
        self.read1 = nn.LSTM(width, width, batch_first=True)
        self.read2 = nn.LSTM(width, width, batch_first=True)
        self.write1 = nn.LSTM(width, width, batch_first=True)
        self.query = nn.Linear(width, width, bias=False)
        self.write2 = nn.LSTM(2 * width, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        """Scores of each target character, (samples, length, symbols), from the source and the characters before."""
        read, _ = self.read1(self.source(source))
        read, _ = self.read2(read)
        written, _ = self.write1(self.target(before))
        weights = torch.softmax(self.query(written) @ read.transpose(1, 2), dim=-1)
        written, _ = self.write2(torch.cat((written, weights @ read), dim=-1))
        scores: Tensor = self.head(written)
        return scores


def digits36() -> Job:
    """The network for digits of peers_jobs.py, with minibatches that three workers can share."""
    return replace(digits(), minibatch=SEQUENCES_BATCH)


def language_low() -> Job:
    """The language model at a quarter of the rate."""
    return replace(language(), optimizer=lambda parameters: AdamW(parameters, lr=2e-3))


def language() -> Job:
    """The language model, with AdamW."""
    text, symbols = _characters()
    windows = text[: len(text) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    held_out = torch.arange(len(windows)) % 10 == 0

    def data() -> Data:
        train, test = windows[~held_out], windows[held_out]
        return Data(TensorDataset(train[:, :-1], train[:, 1:]), TensorDataset(test[:, :-1], test[:, 1:]))

    return _job("language", LanguageModel(symbols), data, 8e-3)


def _characters() -> tuple[Tensor, int]:
    """(text as numbers, number of different characters)."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def translation() -> Job:
    """The model that translates, with AdamW. Raises ModuleNotFoundError where Babel is not installed."""
    pairs = _pairs()
    known = {one: number for number, one in enumerate(sorted(set("".join(map("".join, pairs)))), FIRST_CHARACTER)}
    symbols = FIRST_CHARACTER + len(known) + len(LANGUAGES)
    sources = torch.full((len(pairs), LONGEST + 1), PADDING)
    targets = torch.full((len(pairs), LONGEST + 1), PADDING)
    for number, (language, source, target) in enumerate(pairs):
        sources[number, 0] = symbols - len(LANGUAGES) + LANGUAGES.index(language)
        sources[number, 1 : len(source) + 1] = torch.tensor([known[one] for one in source])
        targets[number, : len(target)] = torch.tensor([known[one] for one in target])
    before = functional.pad(targets[:, :-1], (1, 0), value=BEGIN)
    held_out = torch.arange(len(pairs)) % 10 == 0

    def data() -> Data:
        train, test = (Pairs(sources[some], before[some], targets[some]) for some in (~held_out, held_out))
        return Data(train, test)

    return _job("translation", Translator(symbols), data, 4e-3)


def _job(name: str, model: nn.Module, data: Callable[[], Data], rate: float) -> Job:
    return Job(
        model,
        data=data,
        loss=loss,
        metric=characters_right,
        optimizer=lambda parameters: AdamW(parameters, lr=rate),
        name=name,
        minibatch=SEQUENCES_BATCH,
    )


class Pairs(torch.utils.data.Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Samples of the translation: (source, target moved by one), target."""

    def __init__(self, sources: Tensor, before: Tensor, targets: Tensor) -> None:
        self._tensors = (sources, before, targets)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        sources, before, targets = self._tensors
        return (sources[index], before[index]), targets[index]


def _pairs() -> list[tuple[str, str, str]]:
    """(language, English name, name in that language), of those that differ and are not too long, mixed."""
    from babel import Locale

    english, found = Locale("en"), []
    for language in LANGUAGES:
        other = Locale(language)
        for part in ("languages", "scripts", "territories", "currencies"):
            names, translated = getattr(english, part), getattr(other, part)
            found += [(language, names[key], translated[key]) for key in sorted(set(names) & set(translated))]
    found = [pair for pair in found if pair[1] != pair[2] and max(map(len, pair)) <= LONGEST]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[index] for index in order.tolist()]
