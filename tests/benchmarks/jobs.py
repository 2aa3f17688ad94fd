"""The models that the benchmarks profile and train, besides the bundled ones. Every function without `_` makes a job.

The plain chains of the comparison with peers come first (`SUBJECTS`). They have no dropout or normalisation over the
batch, so that a batch cut into microbatches has the gradients of the whole, whoever cuts it. The text to learn is
Python's own documentation of itself; the longer text goes on with modules of its standard library.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job
from pipeplan_launch.models import image_networks, mnist
from pipeplan_launch.models.gnmt import GNMT8, GNMT16, gnmt_job
from pipeplan_launch.models.image_networks import Block as ResidualBlock

JOBS = Path(__file__)
"""What `pipeplan profile` takes, with a colon and the name of a job."""
SAMPLES = 1024
DIGITS_SIDE = 32
WORDS, TOKENS, WIDTH = 8000, 128, 384
CHARACTERS, MORE_CHARACTERS, LENGTH = 65_000, 650_000, 48
"""Of the text, of the longer text, and of what a model sees at once."""
HELD_OUT = 10
"""One window in so many is for testing."""


class Block(nn.Module):
    """Self-attention, causal by default, and two linear layers, each behind a norm and with a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) in and out."""
        samples, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder-only transformer: embeddings of tokens and positions, blocks, and a head."""

    def __init__(self, vocabulary: int, length: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next token at every place: (samples, tokens, vocabulary)."""
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Recurrent(nn.Module):
    """An LSTM layer whose output is its states alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) to the same."""
        states: Tensor = self.layer(x)[0]
        return states


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over everything that is predicted."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


@torch.no_grad()
def accuracy(job: Job) -> float:
    """The share of the test samples that the model gets right."""
    test: Any = job.datasets.test
    job.model.eval()
    inputs, target = test[:]
    right: Any = job.correct(job.model(inputs), target)
    return float(right) / len(test)


def momentum(parameters: Sequence[nn.Parameter], rate: float = 0.01, share: float = 0.9) -> Optimizer:
    """SGD with momentum."""
    return SGD(parameters, lr=rate, momentum=share)


def _job(model: nn.Module, samples: Callable[[], TensorDataset], name: str, minibatch: int) -> Job:
    def data() -> Data:
        return Data(samples())

    return Job(model, loss=cross_entropy, optimizer=momentum, data=data, name=name, minibatch=minibatch)


def _vectors(classes: int, *shape: int, samples: int = SAMPLES) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(torch.randn(samples, *shape), torch.randint(classes, (samples,)))


def _texts(vocabulary: int, length: int, samples: int = SAMPLES) -> Callable[[], TensorDataset]:
    def made() -> TensorDataset:
        tokens = torch.randint(vocabulary, (samples, length + 1))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    return made


# Of peers.py and time_to_result.py.


@dataclass(frozen=True)
class Subject:
    """A model that is compared, and how it is cut: by the names of the children that begin a stage."""

    name: str
    batch: int
    """Samples per update, over all workers."""
    halves: tuple[str, ...]
    """Two stages; of the cuts between children, the most even by `pipeplan profile`."""
    looped: tuple[str, ...]
    """Four stages, of which each of two workers has every other one; as even."""
    folded: tuple[str, ...]
    """Four stages, of which one worker has the outer two; as even."""


SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "vgg": Subject("vgg", 16, ("conv6",), ("conv3", "conv6", "conv8"), ("conv4", "conv6", "conv8")),
        "gpt": Subject("gpt", 8, ("block5",), ("block3", "block5", "block7"), ("block2", "block5", "block7")),
        **{
            name: Subject(name, batch, ("block2",), ("block1", "block2", "block3"), ("block1", "block2", "block3"))
            for name, batch in (("small_gpt", 16), ("small_vit", 64), ("small_lora", 8))
        },
    }
)


def pieces(model: nn.Module, cuts: Sequence[str]) -> list[nn.Sequential]:
    """The model, cut before each of these children."""
    made = [nn.Sequential()]
    for child, module in model.named_children():
        if child in cuts:
            made.append(nn.Sequential())
        made[-1].add_module(child, module)
    return made


def _chain(children: Mapping[str, nn.Module]) -> nn.Sequential:
    model = nn.Sequential()
    for name, module in children.items():
        model.add_module(name, module)
    return model


def _convolutional(
    channels: int, side: int, blocks: Sequence[Sequence[int]], hidden: Sequence[int], classes: int
) -> nn.Sequential:
    """Blocks of convolutions so many channels wide, a pooling after each; layers so many wide; the classes."""
    children: dict[str, nn.Module] = {}
    number = 0
    for block, widths in enumerate(blocks, 1):
        for width in widths:
            number += 1
            children[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1)
            children[f"relu{number}"] = nn.ReLU()
            channels = width
        children[f"pool{block}"] = nn.MaxPool2d(2)
    children["flat"] = nn.Flatten()
    features = channels * (side >> len(blocks)) ** 2
    for layer, width in enumerate(hidden, 1):
        children[f"hidden{layer}"] = nn.Linear(features, width)
        children[f"active{layer}"] = nn.ReLU()
        features = width
    return _chain(children | {"classes": nn.Linear(features, classes)})


def vgg() -> Job:
    """Like VGG-16 (Simonyan and Zisserman, 2015) in small: 4/5 of 15.6 M weights are in fully connected layers."""
    model = _convolutional(3, 64, ((64, 64), (128, 128), (256, 256, 256), (256, 256)), (2740, 512), 100)
    return _job(model, _vectors(100, 3, 64, 64), "vgg", SUBJECTS["vgg"].batch)


class Words(nn.Module):
    """Tokens and their places as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, TOKENS) integers to (samples, TOKENS, WIDTH)."""
        vectors: Tensor = self.words(tokens)
        return vectors + self.places


def gpt() -> Job:
    """A GPT-2 (Radford et al., 2019) of 8 blocks on 128 tokens, with an output layer of its own: 20.4 M weights."""
    children: dict[str, nn.Module] = {"words": Words()} | {f"block{number}": Block(WIDTH, 6) for number in range(8)}
    children |= {"norm": nn.LayerNorm(WIDTH), "next": nn.Linear(WIDTH, WORDS, bias=False)}
    return _job(_chain(children), _texts(WORDS, TOKENS), "gpt", SUBJECTS["gpt"].batch)


# Of time_to_result.py: chains of four blocks, whose ratio of activations to trained weights is that of a large model.

SMALL, ASCII = 128, 128
"""Width, and characters, of the small language models."""
BASE = "PIPEPLAN_BENCHMARK_BASE"
"""The variable with the path of the weights that `small_lora` adapts; without it they are random."""


class _Embedded(nn.Module):
    """Characters and their places as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(ASCII, SMALL), nn.Embedding(LENGTH, SMALL)

    def forward(self, text: Tensor) -> Tensor:
        """(samples, LENGTH) integers to (samples, LENGTH, SMALL)."""
        vectors: Tensor = self.characters(text)
        return vectors + self.places(torch.arange(text.shape[1], device=text.device))


class _Patches(nn.Module):
    """An image of 32 x 32 as 16 vectors, each with its place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 8, stride=8)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        """(samples, 1, 32, 32) to (samples, 16, width)."""
        vectors: Tensor = self.cut(images)
        return vectors.flatten(2).transpose(1, 2).contiguous() + self.places


class _MeanOverPatches(nn.Module):
    """The mean of the vectors of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """(samples, patches, width) to (samples, width)."""
        return x.mean(dim=1)


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank (LoRA; Hu et al., 2021)."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(frozen.in_features, rank, bias=False),
            nn.Linear(rank, frozen.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """As the frozen layer has it, with the adapter added."""
        y: Tensor = self.frozen(x)
        return y + 2 * self.up(self.down(x))


def _characters(begin: int, count: int) -> Callable[[], Data]:
    """Windows of a part of the text, as ASCII. The whole text is that of `_documentation`, before it is numbered."""

    def made() -> Data:
        codes = torch.frombuffer(bytearray(_text(begin + count)[begin:].encode("ascii", "replace")), dtype=torch.uint8)
        return _cut(codes.long())

    return made


def _language_model() -> nn.Sequential:
    children: dict[str, nn.Module] = {"embedded": _Embedded()}
    children |= {f"block{number}": Block(SMALL, 4) for number in range(4)}
    return _chain(children | {"norm": nn.LayerNorm(SMALL), "next": nn.Linear(SMALL, ASCII, bias=False)})


def small_gpt() -> Job:
    """A language model over characters: 0.8 M weights."""
    job = _job(_language_model(), _vectors(ASCII, LENGTH), "small_gpt", SUBJECTS["small_gpt"].batch)
    data = _characters(0, CHARACTERS)
    return replace(job, data=data, optimizer=lambda parameters: AdamW(parameters, lr=2e-3))


def small_lora() -> Job:
    """The language model, frozen, with adapters of 65,536 weights in its blocks; it learns another text."""
    model = _language_model()
    if path := os.environ.get(BASE):
        model.load_state_dict(torch.load(path, weights_only=True))
    model.requires_grad_(False)
    for number in range(4):
        block: Any = model.get_submodule(f"block{number}")
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, _Adapted(getattr(block, name)))
    job = _job(model, _vectors(ASCII, LENGTH), "small_lora", SUBJECTS["small_lora"].batch)
    trained = lambda parameters: AdamW([one for one in parameters if one.requires_grad], lr=4e-3)  # noqa: E731
    return replace(job, data=_characters(MORE_CHARACTERS - CHARACTERS, CHARACTERS), optimizer=trained)


def small_vit(width: int = 96) -> Job:
    """A vision transformer (Dosovitskiy et al., 2021) for the enlarged digits: 0.45 M weights."""
    children: dict[str, nn.Module] = {"patches": _Patches(width)}
    children |= {f"block{number}": Block(width, 4, causal=False) for number in range(4)}
    children |= {"norm": nn.LayerNorm(width), "mean": _MeanOverPatches(), "classes": nn.Linear(width, 10)}
    job = _job(_chain(children), _vectors(10), "small_vit", SUBJECTS["small_vit"].batch)
    return replace(job, data=_enlarged_digits, optimizer=lambda parameters: AdamW(parameters, lr=2e-3))


def _enlarged_digits() -> Data:
    """The split of the bundled `mnist`, enlarged. An epoch has every sample four times, so that large batches fit."""
    scans, labels = mnist.load_scans()
    images = functional.interpolate(
        scans.unsqueeze(1) / 16, size=(DIGITS_SIDE, DIGITS_SIDE), mode="bilinear", align_corners=False
    )
    split = _split_digits(images, labels, 1280)
    inputs, classes = split.train.tensors
    return replace(split, train=TensorDataset(inputs.repeat(4, 1, 1, 1), classes.repeat(4)))


def _split_digits(images: Tensor, labels: Tensor, count: int) -> Data:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(mnist.SPLIT_SEED))
    train, test = order[:count], order[mnist.TRAIN_SAMPLES :]
    return Data(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]))


# Of learning.py and delays.py.


class SmallLSTM(nn.Module):
    """A language model of two LSTM layers over characters."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.lstm1, self.lstm2 = Recurrent(width), Recurrent(width)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next character at every place: (samples, characters, vocabulary)."""
        scores: Tensor = self.head(self.lstm2(self.lstm1(self.characters(text))))
        return scores


class DigitsResNet(nn.Module):
    """Three residual blocks with BatchNorm, of 8, 16 and 32 channels, for images of 1×8×8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


def _text(characters: int) -> str:
    """The beginning of the text, so many characters."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    modules = sorted(Path(asyncio.__file__).parent.parent.glob("*.py"))
    for module in modules if len(text) < characters else ():
        text += module.read_text(encoding="utf-8").encode("ascii", "ignore").decode()
    return text[:characters]


def _documentation(characters: int = CHARACTERS) -> tuple[Tensor, int]:
    """(the text as numbers, how many different characters it has)."""
    text = _text(characters)
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def _windows(characters: int = CHARACTERS) -> Data:
    return _cut(_documentation(characters)[0])


def _cut(text: Tensor) -> Data:
    """Windows of LENGTH characters and one more."""
    windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held_out = torch.arange(len(windows)) % HELD_OUT == 0
    train, test = windows[~held_out], windows[held_out]
    return Data(TensorDataset(train[:, :-1], train[:, 1:]), TensorDataset(test[:, :-1], test[:, 1:]))


def characters_right(scores: Tensor, following: Tensor) -> Any:
    """Samples that are right, each by the share of its characters that are."""
    return (scores.argmax(dim=-1) == following).float().mean(dim=1).sum()


def text() -> Job:
    """A language model of three blocks."""
    _, characters = _documentation()
    return Job(
        Decoder(characters, LENGTH, width=64, blocks=3, heads=4),
        inputs=lambda n: torch.zeros(n, LENGTH, dtype=torch.int64),
        loss=cross_entropy,
        data=_windows,
        optimizer=lambda parameters: AdamW(parameters, lr=2e-3, fused=True),
        metric=characters_right,
        minibatch=8,
    )


def larger() -> Job:
    """A language model of 2.3 M weights and ten times the text."""
    _, characters = _documentation(MORE_CHARACTERS)
    model = Decoder(characters, LENGTH, width=192, blocks=5, heads=6)
    return replace(text(), model=model, data=partial(_windows, MORE_CHARACTERS), minibatch=16)


def lstm() -> Job:
    """The language model of LSTM layers."""
    return replace(text(), model=SmallLSTM(_documentation()[1]))


def resnet() -> Job:
    """The digits of the bundled `mnist` in their own size, with a ResNet."""

    def data() -> Data:
        images, labels = mnist.load_scans()
        return _split_digits(images.unsqueeze(1) / 16, labels, mnist.TRAIN_SAMPLES)

    inputs = lambda n: torch.rand(n, 1, 8, 8)  # noqa: E731
    return replace(mnist.build(), model=DigitsResNet(), inputs=inputs, data=data, name="resnet")


def _with_momentum(rate: float, share: float) -> Callable[[], Job]:
    return lambda: replace(mnist.build(), optimizer=partial(momentum, rate=rate, share=share))


low, middle, high = _with_momentum(0.02, 0.9), _with_momentum(0.05, 0.9), _with_momentum(0.1, 0.9)
"""The digits under momentum 0.9."""
low0, middle0, high0 = _with_momentum(0.2, 0.0), _with_momentum(0.5, 0.0), _with_momentum(1.0, 0.0)
"""And without momentum, at rates that step as far."""


# Of first_prediction.py: one to five milliseconds a minibatch, and the large ones of its table of memory.


def mlp() -> Job:
    """Five linear layers of 384."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(384, 384), nn.ReLU())]
    return _job(nn.Sequential(*layers, nn.Linear(384, 10)), _vectors(10, 384, samples=2048), "mlp", 32)


def convolutions() -> Job:
    """Four convolutions on images of 16 x 16."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16 * 16, 10))
    return _job(model, _vectors(10, 3, 16, 16, samples=2048), "convolutions", 32)


class _Attention(nn.Module):
    """Self-attention beside a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, words, width) to the same."""
        query, key, value = self.mix(x).chunk(3, dim=-1)
        return x + self.out(functional.scaled_dot_product_attention(query, key, value))


def attention() -> Job:
    """Four layers of self-attention over 16 words of 96 numbers."""
    model = nn.Sequential(*(_Attention(96) for _ in range(4)), nn.Flatten(), nn.Linear(16 * 96, 10))
    return _job(model, _vectors(10, 16, 96, samples=2048), "attention", 32)


def large_mlp() -> Job:
    """Seven linear layers, whose 22 M weights take as long to update as much of the computing does."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(1792, 1792), nn.ReLU())]
    return _job(nn.Sequential(*layers, nn.Linear(1792, 1792)), _vectors(1792, 1792), "large-mlp", 64)


def large_resnet() -> Job:
    """A ResNet of 13 blocks of 64 to 128 channels, for images of 32 x 32: time in convolutions, few weights."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    model.extend(ResidualBlock(64, 64, 1) for _ in range(6))
    model.extend([ResidualBlock(64, 128, 2), *(ResidualBlock(128, 128, 1) for _ in range(6))])
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)])
    return _job(model, _vectors(10, 3, 32, 32), "large-resnet", 16)


def large_lstm() -> Job:
    """A language model of four LSTM layers, 12.4 M weights."""
    model = nn.Sequential(nn.Embedding(4000, 512), *(Recurrent(512) for _ in range(4)), nn.Linear(512, 4000))
    return _job(model, _texts(4000, 32), "large-lstm", 16)


# Of estimates.py.


def gnmt8() -> Job:
    """GNMT-8 on sentences of 31 words."""
    return gnmt_job(replace(GNMT8, source=31, target=31), "gnmt8")


def gnmt16() -> Job:
    """GNMT-16 on sentences of 34 words."""
    return gnmt_job(replace(GNMT16, source=34, target=34), "gnmt16")


def resnet50_mixed() -> Job:
    """ResNet-50 under autocast, channels last."""
    plain = image_networks.resnet50()
    return Job(
        plain.model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        inputs=lambda n: torch.empty(n, 3, 224, 224).to(memory_format=torch.channels_last),
        autocast=torch.bfloat16,
        name="resnet50",
    )
