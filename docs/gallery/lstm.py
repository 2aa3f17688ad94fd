"""Translates numbers in words to numbers in digits, by an encoder and a decoder of LSTMs with attention.

`pipeplan profile lstm.py:job` measures it.
"""

import random
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch import Data, Job

ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
ONES += ["fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = ["", *ONES, *TENS, "hundred", "thousand", "and"]
LENGTH = 11
"""Words in the longest number below a million."""
DIGITS = 6
START = 10
"""The token that the decoder reads before the first digit."""


def in_words(number: int) -> list[str]:
    """The English words of a number; 402007 is four hundred and two thousand seven."""
    if number >= 1000:
        return [*in_words(number // 1000), "thousand", *(in_words(number % 1000) if number % 1000 else [])]
    if number >= 100:
        return [ONES[number // 100 - 1], "hundred", *(["and", *in_words(number % 100)] if number % 100 else [])]
    if number >= 20:
        return [TENS[number // 10 - 2], *(in_words(number % 10) if number % 10 else [])]
    return [ONES[number - 1]]


class Attention(nn.Module):
    """Attention of each state of the decoder to the states of the encoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ask = nn.Linear(width, width, bias=False)

    def forward(self, states: Tensor, encoded: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.ask(states), encoded, encoded)


class Seq2Seq(nn.Module):
    """Reads words, and gives scores for each digit from the digits before it."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width)
        self.encoder1 = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.encoder2 = nn.LSTM(width, width, batch_first=True)
        self.digits = nn.Embedding(11, width)
        self.decoder1 = nn.LSTM(width, width, batch_first=True)
        self.attention1 = Attention(width)
        self.decoder2 = nn.LSTM(2 * width, width, batch_first=True)
        self.attention2 = Attention(width)
        self.scores = nn.Linear(2 * width, 10)

    def forward(self, words: Tensor, before: Tensor) -> Tensor:
        encoded, _ = self.encoder1(self.words(words))
        encoded, _ = self.encoder2(encoded)
        x, _ = self.decoder1(self.digits(before))
        x, _ = self.decoder2(torch.cat([x, self.attention1(x, encoded)], dim=2))
        return self.scores(torch.cat([x, self.attention2(x, encoded)], dim=2))


def sample(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """(words, the digits shifted by one, the digits) of a number."""
    words = [WORDS.index(word) for word in in_words(number)]
    digits = [int(digit) for digit in f"{number:0{DIGITS}}"]
    padded = torch.tensor([0] * (LENGTH - len(words)) + words)
    return padded, torch.tensor([START, *digits[:-1]]), torch.tensor(digits)


def numbers() -> Data:
    """4,608 random numbers below a million for training, and 512 others for testing."""
    drawn = random.Random(0).sample(range(1, 1_000_000), 5120)
    words, before, digits = (torch.stack(column) for column in zip(*map(sample, drawn), strict=True))
    pairs = [((words[i], before[i]), digits[i]) for i in range(len(drawn))]
    return Data(pairs[512:], pairs[:512])


def loss(scores: Tensor, digits: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), digits.flatten())


def right(scores: Tensor, digits: Tensor) -> Tensor:
    """The count of numbers with every digit right."""
    return (scores.argmax(-1) == digits).all(1).sum()


def job(width: int = 96, minibatch: int = 32) -> Job:
    return Job(
        model=Seq2Seq(width),
        loss=loss,
        data=numbers,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        metric=right,
        name="lstm",
        minibatch=minibatch,
    )


def wide() -> Job:
    """The same model eleven times as wide, for planning only."""
    return job(width=1024, minibatch=64)


def translate(model: Seq2Seq, words: list[str]) -> str:
    """The digits of a number in words, each predicted from the digits before it."""
    numbers = [WORDS.index(word) for word in words]
    read = torch.tensor([[0] * (LENGTH - len(numbers)) + numbers])
    written = [START]
    while len(written) <= DIGITS:
        scores = model(read, torch.tensor([written]))
        written.append(int(scores[0, -1].argmax()))
    return "".join(map(str, written[1:]))


if __name__ == "__main__":
    trained = Seq2Seq()
    trained.load_state_dict(torch.load(sys.argv[1], weights_only=True))
    print(f"{' '.join(sys.argv[2:])}: {translate(trained.eval(), sys.argv[2:])}")
