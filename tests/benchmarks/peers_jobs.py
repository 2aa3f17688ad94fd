"""The models of the comparison with peers: plain chains of modules, so that every side can cut them alike.

`vgg` is made like VGG-16 (Simonyan and Zisserman, 2015) in small, for images of 64 x 64: blocks of 3 x 3 convolutions,
then fully connected layers with most of the weights (four fifths of 15.6 M; in VGG-16 nine tenths).
`vgg16` has the very convolutions of VGG-16, for the same images, and nearly all of its 15.6 M weights in them.
`gpt` is a GPT-2 (Radford et al., 2019) of 8 blocks, 384 wide, on 128 tokens, with an output layer of its own: 20.4 M.
`digits` has four convolutions and fully connected layers with 97% of 2.4 M weights, for the scanned digits that
scikit-learn ships, enlarged to 32 x 32: real data, for a comparison of the time until a goal is reached.
None has dropout or normalisation over the batch, so that a batch cut into microbatches has the gradients of the whole,
whoever cuts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job
from pipeplan_launch.models import mnist

IMAGE, CLASSES = 64, 100
DIGITS_IMAGE, DIGITS_BATCH = 32, 32
WORDS, TOKENS, WIDTH, HEADS, BLOCKS = 8000, 128, 384, 6, 8
SAMPLES = 1024
_SMALL = ((64, 64), (128, 128), (256, 256, 256), (256, 256))
_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


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
        "vgg16": Subject("vgg16", 16, ("conv7",), ("conv4", "conv7", "conv10"), ("conv4", "conv7", "conv10")),
        "gpt": Subject("gpt", 8, ("block5",), ("block3", "block5", "block7"), ("block2", "block5", "block7")),
        "digits": Subject("digits", DIGITS_BATCH, ("conv3",), ("conv2", "conv3", "conv4"), ("conv3", "conv4", "flat")),
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


def vgg() -> Job:
    """The network for images."""
    return _convolutional("vgg", _SMALL, (2740, 512))


def vgg16() -> Job:
    """The one with its weights in the convolutions."""
    return _convolutional("vgg16", _VGG16, (400,))


def _convolutional(name: str, blocks: Sequence[Sequence[int]], hidden: Sequence[int]) -> Job:
    """Blocks of convolutions so many channels wide, a pooling after each; layers so many wide; the classes."""
    children: dict[str, nn.Module] = {}
    channels, number = 3, 0
    for block, widths in enumerate(blocks, 1):
        for width in widths:
            number += 1
            children[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1)
            children[f"relu{number}"] = nn.ReLU()
            channels = width
        children[f"pool{block}"] = nn.MaxPool2d(2)
    children["flat"] = nn.Flatten()
    features = channels * (IMAGE >> len(blocks)) ** 2
    for layer, width in enumerate(hidden, 1):
        children[f"hidden{layer}"] = nn.Linear(features, width)
        children[f"active{layer}"] = nn.ReLU()
        features = width
    children["classes"] = nn.Linear(features, CLASSES)
    return _job(name, children, _images)


def digits() -> Job:
    """The network for digits, with AdamW."""
    children: dict[str, nn.Module] = {}
    channels = 1
    for number, (width, halves) in enumerate(((32, False), (32, True), (64, False), (64, True)), 1):
        children[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1)
        children[f"relu{number}"] = nn.ReLU()
        if halves:
            children[f"pool{number}"] = nn.MaxPool2d(2)
        channels = width
    children["flat"] = nn.Flatten()
    children["hidden1"] = nn.Linear(channels * (DIGITS_IMAGE // 4) ** 2, 512)
    children["active1"] = nn.ReLU()
    children["hidden2"] = nn.Linear(512, 512)
    children["active2"] = nn.ReLU()
    children["classes"] = nn.Linear(512, 10)
    job = _job("digits", children, _images)
    return replace(job, data=_digits, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def gpt() -> Job:
    """The network for text."""
    children: dict[str, nn.Module] = {"words": Words()}
    children |= {f"block{number}": Block() for number in range(BLOCKS)}
    children |= {"norm": nn.LayerNorm(WIDTH), "next": nn.Linear(WIDTH, WORDS, bias=False)}
    return _job("gpt", children, _texts)


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


class Block(nn.Module):
    """Causal attention, then two layers; each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.before_layers = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, vectors: Tensor) -> Tensor:
        """(samples, TOKENS, WIDTH) to the same."""
        parts = self.attend(self.before_attention(vectors)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        vectors = vectors + self.mix(attended.transpose(1, 2).flatten(2))
        added: Tensor = vectors + self.layers(self.before_layers(vectors))
        return added


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, the mean over everything that is predicted."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What every side updates with."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _job(name: str, children: Mapping[str, nn.Module], samples: Callable[[], TensorDataset]) -> Job:
    model = nn.Sequential()
    for child, module in children.items():
        model.add_module(child, module)
    data = partial(_data, samples)
    return Job(model, loss=loss, optimizer=optimizer, data=data, name=name, minibatch=SUBJECTS[name].batch)


def _data(samples: Callable[[], TensorDataset]) -> Data:
    return Data(samples())


def _images() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 3, IMAGE, IMAGE), torch.randint(0, CLASSES, (SAMPLES,)))


def _digits() -> Data:
    """Enlarged digits, the split of the bundled `mnist`; whole batches only, as the peer's stages want one shape."""
    scans, labels = mnist.load_scans()
    size = (DIGITS_IMAGE, DIGITS_IMAGE)
    images = functional.interpolate(scans.unsqueeze(1) / 16, size=size, mode="bilinear", align_corners=False)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(mnist.SPLIT_SEED))
    train = order[: mnist.TRAIN_SAMPLES // DIGITS_BATCH * DIGITS_BATCH]
    test = order[mnist.TRAIN_SAMPLES :]
    return Data(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]))


def _texts() -> TensorDataset:
    tokens = torch.randint(0, WORDS, (SAMPLES, TOKENS + 1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
