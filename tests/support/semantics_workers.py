"""Tiny models in 64-bit numbers for the tests of weight semantics, and real workers that train them.

Together the models have what a cut can meet: several tensors across it, whole numbers and truth values among them,
skips over a stage, a cut inside a residual block, dropout, BatchNorm's buffers, two inputs that different stages read,
masks, and tied weights.

Every worker runs the executor's own `main`, from reading the plan's stage files to the last checkpoint. Only building
and tracing the model are taken from the parent, which has done so with the executor's own `trace`: that takes longer
than training it. What each worker is left with, replicas included, is what it hands back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from feature_workers import cut_before
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, TensorDataset
from toy_workers import STAGE, write_plan
from worker_host import start_attempt

from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.tracing import split
from pipeplan_launch.tracing.split import StageProgram
from pipeplan_launch.tracing.trace import TracedModel, trace_job

CLASSES = 4


class Chain(nn.Module):
    """Layers in a row. The first also makes whole numbers and truth values that the last reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.table, self.last = nn.Embedding(6, CLASSES), nn.Linear(6, CLASSES)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x))
        chosen, positive = h.argmax(dim=1), h.sum(dim=1, keepdim=True) > 0
        h = self.dropout(h)
        h = self.dropout(torch.tanh(self.two(h)))
        h = torch.tanh(self.three(h))
        return self.last(torch.where(positive, h, 0.5 * h)) + self.table(chosen)


class Block(nn.Module):
    """A residual block, its shortcut a convolution where the number of channels changes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Two residual blocks, both cut inside, and a long skip from the stem to the head, over the stage in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.block1, self.block2 = Block(3, 3), Block(3, 4)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        y = self.block2(self.block1(stem))
        return self.head(torch.cat([y.mean(dim=(2, 3)), stem.amax(dim=(2, 3))], dim=1))


class Attention(nn.Module):
    """One head: queries of one sequence, keys and values of another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.both, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        key, value = self.both(memory).chunk(2, dim=-1)
        mixed = functional.scaled_dot_product_attention(self.query(x), key, value, attn_mask=mask)
        return x + self.dropout(self.out(mixed))


class Translator(nn.Module):
    """An encoder, and a decoder that attends to itself and to the encoder's output, padding left out."""

    def __init__(self, width: int = 6, words: int = 7) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encode, self.decode, self.cross = Attention(width), Attention(width), Attention(width)
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        known = (source > 0).unsqueeze(1)
        memory = self.source(source)
        memory = self.encode(memory, memory, known)
        memory = memory + functional.gelu(self.mlp(self.norm1(memory)))
        length = target.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        x = self.target(target)
        x = self.decode(x, x, earlier)
        return self.head(self.norm2(self.cross(x, memory, known)))


class Captioner(nn.Module):
    """Features, then words that follow from them and the words before; the head shares the embedding's weight."""

    def __init__(self, width: int = 6, words: int = 7) -> None:
        super().__init__()
        self.see1, self.see2 = nn.Linear(5, 8), nn.Linear(8, width)
        self.words, self.mix = nn.Embedding(words, width), nn.Linear(width, width)
        self.dropout, self.norm = nn.Dropout(0.1), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, features: Tensor, before: Tensor) -> Tensor:
        seen = functional.silu(self.see1(features))
        context = torch.tanh(self.see2(self.dropout(seen))).unsqueeze(1)
        x = self.words(before) + context
        return self.head(self.norm(x + self.dropout(functional.gelu(self.mix(x)))))


def of_classes(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over classes or over the words of a sequence."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Sequences(Dataset[Any]):
    """Samples of two inputs and a target, as map-style data sets have them."""

    def __init__(self, first: Tensor, second: Tensor, target: Tensor) -> None:
        self._samples = list(zip(zip(first, second, strict=True), target, strict=True))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


@dataclass(frozen=True)
class Subject:
    """A model to train, and where to cut it."""

    model: Callable[[], nn.Module]
    data: Callable[[int], Dataset[Any]]
    """The data set of so many samples."""
    cuts: tuple[str, ...]
    """The modules that the second and the third of three stages begin with."""
    loss: Callable[[Any, Any], Tensor] = of_classes
    loss_weight: Callable[[Any], Any] | None = None

    def build(self, dropout: bool = True) -> nn.Module:
        """The model, with the same weights every time, and with dropout that never drops where that is wanted."""
        torch.manual_seed(3)
        model = self.model().double()
        for module in model.modules():
            if isinstance(module, nn.Dropout) and not dropout:
                module.p = 0.0
        return model


def _numbers(*shape: int, seed: int = 17) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _words(*shape: int, seed: int = 19, least: int = 0) -> Tensor:
    return torch.randint(least, 7, shape, generator=torch.Generator().manual_seed(seed))


def _classes(count: int) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(23))


def _sentences(count: int) -> Dataset[Any]:
    source = _words(count, 4)
    source[:, 0] = 1  # at least one word is known
    return Sequences(source, _words(count, 3, seed=29), _words(count, 3, seed=31))


class Decoder(nn.Module):
    """A GPT whose head shares the embedding's weight, and whose blocks share one layer that neither end has."""

    def __init__(self, width: int = 6, words: int = 7) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(3, width)
        self.one, self.two, self.mix = Attention(width), Attention(width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, before: Tensor, also: Tensor) -> Tensor:
        length = before.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=before.device).tril()
        x = self.words(before) + self.words(also) + self.places(torch.arange(length, device=before.device))
        x = self.mix(self.one(x, x, earlier))
        x = self.norm1(x)
        x = self.mix(self.two(x, x, earlier))
        return self.head(self.norm2(x))


class Tagger(nn.Module):
    """A class for each of some words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(7, 6), nn.Linear(6, CLASSES)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.two(torch.tanh(self.one(self.words(x))))))


def over_valid(output: Tensor, target: Tensor) -> Tensor:
    """The mean over valid targets, written out: it is no number if there are none."""
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten().clamp(min=0), reduction="none")
    valid = target.flatten() >= 0
    return (each * valid).sum() / valid.sum()


def _padded(count: int) -> Dataset[Any]:
    """Sentences of zero to four words, of which some minibatches have none at all."""
    classes = torch.randint(CLASSES, (count, 4), generator=torch.Generator().manual_seed(41))
    lengths = torch.randint(5, (count, 1), generator=torch.Generator().manual_seed(43))
    lengths[torch.arange(count) % 2 > 0] = 0
    return TensorDataset(_words(count, 4), classes.masked_fill(torch.arange(4) >= lengths, -100))


class Deep(nn.Module):
    """Twelve layers with shortcuts, BatchNorm and dropout, and whole numbers that cross every cut."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(12):
            setattr(self, f"layer{number}", nn.Linear(5, 5))
        self.norm, self.dropout, self.head = nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        largest, first = x.argmax(dim=1), x
        for number in range(12):
            x = x + self.dropout(torch.tanh(getattr(self, f"layer{number}")(x)))
            if number == 5:
                x = self.norm(x)
        return self.head(x + first) + functional.one_hot(largest, 5)[:, :CLASSES]


SUBJECTS = {
    "chain": Subject(Chain, lambda n: TensorDataset(_numbers(n, 5), _classes(n)), ("two", "three")),
    "resnet": Subject(
        ResNet, lambda n: TensorDataset(_numbers(n, 2, 4, 4), _classes(n)), ("block1.conv2", "block2.norm2")
    ),
    "encoder-decoder": Subject(Translator, _sentences, ("norm1", "cross.query")),
    "tied": Subject(
        Captioner, lambda n: Sequences(_numbers(n, 5), _words(n, 3), _words(n, 3, seed=37)), ("see2", "words")
    ),
}
ALL_SUBJECTS = SUBJECTS | {
    # Its cuts separate layers that share weights, which only a flush allows.
    "decoder": Subject(
        Decoder,
        lambda n: Sequences(_words(n, 3), _words(n, 3, seed=29), _words(n, 3, seed=37)),
        ("norm1", "norm2"),
    ),
    # For pipelines of many stages; cases name their own cuts.
    "deep": Subject(Deep, lambda n: TensorDataset(_numbers(n, 5), _classes(n)), ()),
    # Its loss is a mean over valid targets, and its job says so.
    "tagger": Subject(Tagger, _padded, ("one", "two"), over_valid, lambda target: (target != -100).sum()),
}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd-foreach": lambda p: SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: SGD(p, lr=0.02, momentum=0.9, fused=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, fused=True),
}


def job_of(subject: Subject, optimizer: str, samples: int, dropout: bool = True, clip: float | None = None) -> Job:
    """The job that the executor is given."""
    return Job(
        subject.build(dropout),
        loss=subject.loss,
        loss_weight=subject.loss_weight,
        data=lambda: Data(subject.data(samples)),
        optimizer=OPTIMIZERS[optimizer],
        clip_norm=clip,
    )


@dataclass(frozen=True)
class Case:
    """A training run."""

    subject: str
    schedule: str
    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    accumulate: int
    optimizer: str
    samples: int
    minibatch: int = 3
    epochs: int = 2
    seed: int = 0
    dropout: bool = True
    recompute: bool = False
    clip: float | None = None
    correction: str = "none"
    flush_epochs: int = 0
    transport: str = "auto"
    shards: bool = False
    resume: Path | None = None
    """The folder of a run to go on from."""
    deferred: tuple[int, ...] | None = None
    """Minibatches whose gradients of weights each stage puts off; None for as many as its number."""
    devices: int | None = None
    """Positions of the pipeline, where workers run several stages each; else None."""
    layers_between: tuple[str, ...] | None = None
    """Where the second and later stages begin; None for the places that the model names."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(self.replicas) if self.devices is None else self.devices * self.replicas[0]

    @property
    def ranks(self) -> list[list[int]]:
        """The workers of each stage."""
        if self.devices is None:
            return _ranks(self.replicas)
        virtual = SCHEDULES[self.schedule].virtual
        assert virtual is not None
        of_devices = _ranks(self.replicas[: self.devices])
        return [of_devices[virtual.device_of(stage, self.devices)] for stage in range(len(self.replicas))]

    @property
    def cuts(self) -> tuple[str, ...]:
        """Where the second and later stages begin: with two stages, at a place that depends on the shape."""
        if self.layers_between is not None:
            return self.layers_between
        cuts = ALL_SUBJECTS[self.subject].cuts
        return cuts if len(self.replicas) == 3 else cuts[self.replicas[-1] > 1 :][: len(self.replicas) - 1]


Left = dict[str, dict[str, Tensor]]
"""`parameters` and `buffers` of a worker, by name."""


class CaseRun:
    """The workers of a case, started, and what they leave behind."""

    def __init__(self, folder: Path, case: Case) -> None:
        """Start the workers; stage files and what is left go into `folder`."""
        self._folder, self._case = folder, case
        given = [(folder, case, rank) for rank in range(case.workers)]
        self._workers = start_attempt(_work, given, folder, prepare=(_prepare, (folder, case)))

    def left(self) -> list[list[Left]]:
        """Wait for the workers: by stage, what each replica is left with."""
        ended = self._workers.finish()
        assert ended.statuses == [0] * self._case.workers, ended.err
        return [
            [torch.load(self._folder / f"{rank}-{stage}.pt") for rank in ranks]
            for stage, ranks in enumerate(self._case.ranks)
        ]


def _prepare(folder: Path, case: Case) -> TracedModel:
    """Trace the model of a case and write its stage files; the host traces each model once."""
    traced = _traced(case.subject, case.dropout, case.minibatch)
    _write_plan(folder, case, traced)
    return traced


@cache
def _traced(subject: str, dropout: bool, minibatch: int) -> TracedModel:
    return trace_job(job_of(ALL_SUBJECTS[subject], next(iter(OPTIMIZERS)), 6, dropout), minibatch)


def _work(traced: TracedModel, folder: Path, case: Case, rank: int) -> int:
    """Be one worker, and leave its parameters and buffers in a file."""
    from pipeplan_launch import __main__
    from pipeplan_launch.runtime import stage_checkpoint, stage_setup

    stage_checkpoint.BATCH_BYTES = 1  # a divided optimiser is saved in as many batches as it has tensors
    job = job_of(ALL_SUBJECTS[case.subject], case.optimizer, case.samples, case.dropout, case.clip)
    kept: list[StageProgram] = []

    def stage_program(*arguments: Any) -> StageProgram:
        kept.append(split.build_stage_program(*arguments))
        return kept[-1]

    stage_setup.load_job = lambda *_: job
    stage_setup.trace_job = lambda *_: traced
    stage_setup.build_stage_program = stage_program
    given: dict[str, Any] = {"transport": case.transport, "run-dir": folder / "run", "epochs": case.epochs}
    given |= {"checkpoint-every": case.epochs, "seed": case.seed, "flush-epochs": case.flush_epochs}
    given |= {"threads": 1, "log-every": 0} | ({} if case.resume is None else {"resume-from": case.resume})
    flags = ["--force-correction"] * (case.correction == "ef") + ["--shard-optimizer"] * case.shards
    status = __main__.main([str(folder), *flags, *(f"--{name}={value}" for name, value in given.items())])
    own = [stage for stage, ranks in enumerate(case.ranks) if rank in ranks]
    for stage, program in zip(own, kept, strict=True):
        left: Left = {"parameters": program.parameters_by_name(), "buffers": program.buffers_by_name()}
        detached = {kind: {name: one.detach().clone() for name, one in of.items()} for kind, of in left.items()}
        torch.save(detached, folder / f"{rank}-{stage}.pt")
    return status


def _ranks(replicas: Sequence[int]) -> list[list[int]]:
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return [list(range(first, first + count)) for first, count in zip(firsts, replicas, strict=True)]


def _write_plan(folder: Path, case: Case, traced: TracedModel) -> None:
    """The stage files of a case, as the planner writes them."""
    splits = SCHEDULES[case.schedule].splits
    pipeline = [
        {"workers": ranks, "depth": depth, "versions": depth + 1, "recompute": case.recompute}
        | ({"deferred": number if case.deferred is None else case.deferred[number]} if splits else {})
        for number, (ranks, depth) in enumerate(zip(case.ranks, case.depths, strict=True))
    ]
    shared = STAGE | {
        "mode": "training",
        "model": {"ref": case.subject, "graph_hash": traced.graph_hash},
        "minibatch": case.minibatch,
        "workers_per_server": case.workers,
        "schedule": {"name": case.schedule, "accumulate": case.accumulate, "correction": case.correction},
        "pipeline": pipeline,
    }
    stages = enumerate(cut_before(traced, *case.cuts))
    write_plan(folder, [shared | {"stage": stage, "layers": layers} for stage, layers in stages])
