"""Jobs in 64-bit numbers for the data-parallel engine, their runs by real workers, and one plain PyTorch process.

The jobs have much of what a mean over replicas must cope with. `AdaptedChain` has frozen weights, in 32 or in 8 bits,
with small trained adapters beside them (LoRA). The one process trains as the workers should.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_workers import trained
from literal import State, agree
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from toy_workers import stage_contents, write_plan
from worker_host import Ended, start_attempt

from pipeplan_launch import Data, Job, __main__, load_job
from pipeplan_launch.devices.backend import Backend
from pipeplan_launch.job.pass_conditions import autocast, mix_seed, seed_forward
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment


class EightBits(Tensor):
    """A matrix of 8 bits with a scale for each row, as libraries of quantisation hold it."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> EightBits:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _meta: None, _size: Any, _stride: Any) -> EightBits:
        return EightBits(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return EightBits(args[0].codes, args[0].scales)
        plain = tree_map_only(EightBits, lambda one: one.codes * one.scales, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def quantised(weight: Tensor) -> nn.Parameter:
    """The weight in 8 bits, frozen."""
    scales = weight.detach().abs().amax(dim=1, keepdim=True) / 127
    return nn.Parameter(EightBits((weight.detach() / scales).round().to(torch.int8), scales), requires_grad=False)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of rank 2."""

    def __init__(self, width: int, *, eight_bits: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        if eight_bits:
            self.base.weight = quantised(self.base.weight)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + 2.0 * self.up(self.down(x)))


class AdaptedChain(nn.Module):
    """A frozen layer, adapted blocks, and an output that has the frozen layer's weights."""

    def __init__(self, width: int = 8, blocks: int = 3, *, eight_bits: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(width, eight_bits=eight_bits) for _ in range(blocks))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints and self.training else block(x)
        return functional.linear(x, self.first.weight)


WORDS, WIDTH, LENGTH = 11, 6, 5
SAMPLES, TEST_SAMPLES, MINIBATCH = 26, 7, 2
"""13 minibatches: the last group of an update is short for 2 and 3 replicas."""


class Block(nn.Module):
    """A repeated block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(self.norm(x))))


class Tagger(nn.Module):
    """Tied words, repeated blocks, a frozen and an unused parameter, and BatchNorm over the words of a minibatch."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.shift = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)
        self.register_buffer("unread", torch.ones(2), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) * self.factor
        for block in self.blocks:
            x = block(x)
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.shift(x) + x)


class Loss(nn.Module):
    """A loss with a weight to train and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WORDS))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy((output * self.scale).flatten(0, 1), target.flatten())
        if self.training:
            with torch.no_grad():
                self.mean += 0.1 * (loss.detach().nan_to_num() - self.mean)
        return loss


def tagged() -> Data:
    words = torch.randint(WORDS, (SAMPLES + TEST_SAMPLES, LENGTH))
    classes = (words + torch.randint(2, words.shape)) % WORDS
    classes[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (len(words), 1))] = -100  # padding
    return Data(TensorDataset(words[:SAMPLES], classes[:SAMPLES]), TensorDataset(words[SAMPLES:], classes[SAMPLES:]))


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(2) == target).float().mean()


def adamw(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=0.03, weight_decay=0.1)


def job(batch_norm: bool = False, **more: Any) -> Job:
    """A job with AdamW, clipping, a scheduler, a stateful loss and evaluation; `more` replaces its fields."""
    fields: dict[str, Any] = {
        "loss": Loss().double(),
        "optimizer": adamw,
        "scheduler": lambda optimizer: ExponentialLR(optimizer, 0.9),
        "clip_norm": 0.5,
        "metrics": {"right": right},
        "minibatch": MINIBATCH,
    }
    return Job(Tagger(batch_norm).double(), data=tagged, **fields | more)


def plain() -> Job:
    return job()


def valid_targets() -> Job:
    return job(loss_weight=lambda target: (target != -100).sum())


def normalised() -> Job:
    return job(batch_norm=True, scheduler_interval="minibatch")


def hooked() -> Job:
    """A hook on a parameter that sees and changes the mean gradient of an update."""
    made = job(optimizer=lambda parameters: SGD(parameters, lr=0.2))
    made.model.blocks[0].inner.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return made


class Mortal(Tagger):
    """In the first attempts of a launch, one process ends at a call: as `DIES` says, `RANK:CALL` for each attempt."""

    calls = 0

    def forward(self, words: Tensor) -> Tensor:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        dies = os.environ.get("DIES", "").split()
        if attempt < len(dies) and dies[attempt] == f"{os.environ['RANK']}:{self.calls}":
            os._exit(9)
        self.calls += 1
        return super().forward(words)


def mortal() -> Job:
    return dataclasses.replace(job(), model=Mortal(batch_norm=True).double())


SLEEP_S = 0.05


class Slow(Tagger):
    """Process 1 is late with its gradients."""

    def forward(self, words: Tensor) -> Tensor:
        output = super().forward(words)
        if output.requires_grad and os.environ["RANK"] == "1":
            output.register_hook(lambda _: time.sleep(SLEEP_S))
        return output


def unequal_speeds() -> Job:
    return dataclasses.replace(job(), model=Slow(batch_norm=False).double())


def all_used() -> Job:
    """A job all of whose parameters have gradients."""
    made = plain()
    del made.model.unused
    return made


def points() -> Data:
    """Points, and rotations of them."""
    points = torch.randn(24, 8)
    return Data(TensorDataset(points, points.roll(1, dims=1)))


def adapted(eight_bits: bool = False) -> Job:
    """Frozen weights with trained adapters."""
    return Job(
        AdaptedChain(eight_bits=eight_bits),
        loss=functional.mse_loss,
        data=points,
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        minibatch=MINIBATCH,
    )


def adapted_in_eight_bits() -> Job:
    """The same with frozen weights in 8 bits."""
    return adapted(eight_bits=True)


def reference(name: str) -> str:
    return f"{__file__}:{name}"


def on_shared_devices(arguments: list[str]) -> int | None:
    """A worker that shares a GPU with others, as its rank assignment says."""
    Backend.copies_to_host = True
    RankAssignment.own_device_each = lambda _self: False  # type: ignore[method-assign]
    return __main__.main(arguments)


@dataclass(frozen=True)
class Case:
    """A job and a data-parallel plan."""

    job: str
    mode: str
    replicas: int
    accumulate: int
    servers: int = 1
    recompute: bool = False
    shares: tuple[int, ...] = ()

    def write(self, folder: Path, **shared: Any) -> Path:
        """The plan folder; `shared` replaces fields of its stage file."""
        (content,) = stage_contents(
            [self.replicas],
            minibatch=MINIBATCH,
            schedule="1f1b-flush",
            accumulate=self.accumulate,
            recompute=[self.recompute],
        )
        content |= {"layers": ["all"], "model": {"ref": reference(self.job)}, "data_parallel": self.mode}
        if self.shares:
            content["pipeline"][0]["shares"] = list(self.shares)
        content |= {"servers": self.servers, "workers_per_server": self.replicas // self.servers}
        return write_plan(folder, [content | shared])

    def start(
        self,
        folder: Path,
        *options: str,
        run: str = "run",
        store: Any = None,
        name: str = "worker",
        main: Callable[[list[str]], int | None] = __main__.main,
        **variables: str,
    ) -> Ended:
        """The workers of a run of a plan folder, to their end. `variables`: of their environment."""
        arguments = [str(folder), "--run-dir", str(folder / run), "--threads", "1", "--probe", "0", *options]
        given, more = [(arguments,)] * self.replicas, [variables] * self.replicas
        return start_attempt(main, given, folder, store=store, variables=more, name=name).finish()

    def train(self, folder: Path, *options: str, run: str = "run", **shared: Any) -> Path:
        """The run folder of a run that ends well."""
        ended = self.start(self.write(folder, **shared), *options, run=run)
        assert ended.statuses == [0] * self.replicas, ended.err
        assert "FutureWarning" not in ended.err
        return folder / run


def modules_of(job: Job) -> dict[str, nn.Module]:
    """The modules of a job's loss, found by hand, by the prefix of their state."""
    loss: Any = job.loss
    if isinstance(loss, nn.Module):
        return {"loss.": loss}
    cells = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    if len(cells) == 2:
        return dict(zip(("loss.first.", "loss.second."), cells, strict=True))
    held = [*getattr(loss, "parts", ()), getattr(loss, "__self__", None), *getattr(loss, "args", ())]
    found = [one for one in held if isinstance(one, nn.Module)]
    return {"loss.": found[0]} if found else {}


class OneProcess:
    """One process that trains a job as a plan with a flush says, with buffers of its own for each replica."""

    def __init__(self, job: Job, replicas: int, accumulate: int, shares: tuple[int, ...] = ()) -> None:
        """`replicas`: of the stage that has buffers."""
        self.job, self.accumulate, self.data = job, accumulate, job.datasets
        self.taken_by = [number for number, share in enumerate(shares) for _ in range(share)] or [*range(replicas)]
        self.modules = {"": job.model, **modules_of(job)}
        self.named = {prefix + n: p for prefix, one in self.modules.items() for n, p in one.named_parameters()}
        self.trained = {name: one for name, one in self.named.items() if one.requires_grad}
        self.hooks: dict[str, Any] = {}
        for name, parameter in self.trained.items():
            if parameter._backward_hooks:
                self.hooks[name] = list(parameter._backward_hooks.values())
                parameter._backward_hooks = None
        self.optimizer = job.make_optimizer([*self.trained.values()])
        self.scheduler = None if job.scheduler is None else job.scheduler(self.optimizer)
        self.buffers = [{n: b.clone() for n, b in self.own_buffers().items()} for _ in range(replicas)]
        self.epochs: list[dict[str, float]] = []
        """Results of the epochs."""

    def own_buffers(self) -> State:
        return {prefix + n: b for prefix, one in self.modules.items() for n, b in one.named_buffers()}

    def use(self, buffers: State) -> None:
        for name, buffer in self.own_buffers().items():
            buffer.copy_(buffers[name])

    def loss_of(self, inputs: Any, target: Any) -> tuple[Any, Tensor]:
        """(output, loss)."""
        assert self.job.loss is not None
        with autocast(self.job.autocast, torch.device("cpu")):
            output = self.job.model(inputs)
            return output, self.job.loss(output, target)

    def weigh(self, target: Any) -> float:
        return float(len(target) if self.job.loss_weight is None else self.job.loss_weight(target))

    def train(self, epochs: int) -> State:
        """The model's and the loss's parameters and buffers after the epochs."""
        for one in self.modules.values():
            one.train()
        count = len(self.data.train)  # type: ignore[arg-type]
        for epoch in range(epochs):
            order = torch.randperm(count, generator=torch.Generator().manual_seed(mix_seed("order", 0, epoch)))
            numbered = list(enumerate(order.split(self.job.minibatch or 1)))
            losses = []
            for start in range(0, len(numbered), self.accumulate):
                losses += self.update(epoch, numbered[start : start + self.accumulate])
            agree(self.buffers)
            self.use(self.buffers[0])
            total = sum(weight for _, weight in losses)
            self.epochs.append({"loss": sum(loss * weight for loss, weight in losses) / total} | self.evaluate())
            if self.scheduler is not None and self.job.scheduler_interval == "epoch":
                self.scheduler.step()
        return {**{n: p.detach() for n, p in self.named.items()}, **self.own_buffers()}

    def update(self, epoch: int, group: list[tuple[int, Tensor]]) -> list[tuple[float, float]]:
        """(loss, weight) of each minibatch of the group."""
        taken = [self.data.train[chosen] for _, chosen in group]
        weights = [self.weigh(target) for _, target in taken]
        losses = []
        for (number, _), (inputs, target), weight in zip(group, taken, weights, strict=True):
            own = self.buffers[self.taken_by[number % len(self.taken_by)]]
            self.use(own)
            seed_forward(0, epoch, number, 0)
            _, loss = self.loss_of(inputs, target)
            (loss * (weight / sum(weights))).backward()
            losses.append((float(loss.detach()), weight))
            own |= {name: buffer.clone() for name, buffer in self.own_buffers().items()}
        for name, hooks in self.hooks.items():
            for hook in hooks:
                self.trained[name].grad = hook(self.trained[name].grad)
        if self.job.clip_norm is not None:
            nn.utils.clip_grad_norm_([*self.trained.values()], self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None and self.job.scheduler_interval == "minibatch":
            for _ in group:
                self.scheduler.step()
        return losses

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The mean loss of the test data, the number of right answers, and means of the job's other metrics."""
        if self.data.test is None:
            return {}
        for one in self.modules.values():
            one.eval()
        count, losses, weights = len(self.data.test), 0.0, 0.0  # type: ignore[arg-type]
        found = dict.fromkeys(("correct", *self.job.metrics), 0.0)
        for chosen in torch.arange(count).split(self.job.minibatch or 1):
            inputs, target = self.data.test[chosen]  # type: ignore[index]
            self.use(self.buffers[0])  # an evaluation leaves no trace in the buffers of the loss
            output, loss = self.loss_of(inputs, target)
            losses, weights = losses + float(loss) * self.weigh(target), weights + self.weigh(target)
            found["correct"] += float(self.job.metric(output, target)) if self.job.metric else 0.0
            for name, metric in self.job.metrics.items():
                found[name] += float(metric(output, target)) * len(target) / count
        self.use(self.buffers[0])
        for one in self.modules.values():
            one.train()
        return {"test_loss": losses / weights, **found}


def assert_equal_to_one_process(case: Case, run: Path, epochs: int, but: tuple[str, ...] = ()) -> None:
    """`but`: names of the state that is left out."""
    literal = OneProcess(load_job(reference(case.job), 0), case.replicas, case.accumulate, case.shares)
    expected, ours = literal.train(epochs), trained(run)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if name in but:
            continue
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")
    for result, one in zip(json.loads((run / "summary.json").read_text())["epochs"], literal.epochs, strict=True):
        assert result["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert result["test_loss"] == pytest.approx(one["test_loss"], rel=1e-10)
        assert result["test_metrics"]["right"] == pytest.approx(one["right"], rel=1e-10)
