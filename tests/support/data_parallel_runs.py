"""Runs of the data-parallel engine by real workers, and one plain PyTorch process that trains as they should."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import data_parallel_jobs
import pytest
import torch
from data_parallel_jobs import MINIBATCH, SAMPLES, TEST_SAMPLES
from feature_workers import trained
from literal import State, agree
from torch import Tensor
from toy_workers import stage_contents, write_plan
from worker_host import Ended, start_attempt

from pipeplan_launch import __main__, load_job
from pipeplan_launch.job.pass_conditions import mix_seed, seed_forward


def reference(name: str) -> str:
    return f"{data_parallel_jobs.__file__}:{name}"


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
        self, folder: Path, *options: str, run: str = "run", store: Any = None, name: str = "worker", **variables: str
    ) -> Ended:
        """The workers of a run of a plan folder, to their end. `variables`: of their environment."""
        arguments = [str(folder), "--run-dir", str(folder / run), "--threads", "1", "--probe", "0", *options]
        given, more = [(arguments,)] * self.replicas, [variables] * self.replicas
        return start_attempt(__main__.main, given, folder, store=store, variables=more, name=name).finish()

    def train(self, folder: Path, *options: str, run: str = "run", **shared: Any) -> Path:
        """The run folder of a run that ends well."""
        ended = self.start(self.write(folder, **shared), *options, run=run)
        assert ended.statuses == [0] * self.replicas, ended.err
        assert "FutureWarning" not in ended.err
        return folder / run


@dataclass
class Literal:
    """One process that trains the job as the plan says, with buffers of its own for each replica."""

    case: Case
    epochs: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = load_job(reference(self.case.job), 0)
        self.hooks: dict[str, Any] = {}
        loss = self.job.loss
        assert isinstance(loss, torch.nn.Module)
        self.loss, self.model, self.data = loss, self.job.model.train(), self.job.datasets
        self.named = dict(self.model.named_parameters()) | {f"loss.{n}": p for n, p in loss.named_parameters()}
        self.trained = {name: one for name, one in self.named.items() if one.requires_grad}
        for name, parameter in self.trained.items():
            if parameter._backward_hooks:
                self.hooks[name] = list(parameter._backward_hooks.values())
                parameter._backward_hooks = None
        self.optimizer = self.job.make_optimizer([*self.trained.values()])
        assert self.job.scheduler is not None
        self.scheduler = self.job.scheduler(self.optimizer)
        self.buffers = [{n: b.clone() for n, b in self.own_buffers().items()} for _ in range(self.case.replicas)]

    def own_buffers(self) -> State:
        return dict(self.model.named_buffers()) | {f"loss.{n}": b for n, b in self.loss.named_buffers()}

    def use(self, buffers: State) -> None:
        for name, buffer in self.own_buffers().items():
            buffer.copy_(buffers[name])

    def train(self, epochs: int) -> State:
        for epoch in range(epochs):
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mix_seed("order", 0, epoch)))
            numbered = list(enumerate(order.split(MINIBATCH)))
            losses = []
            for start in range(0, len(numbered), self.case.accumulate):
                losses += self.update(epoch, numbered[start : start + self.case.accumulate])
            agree(self.buffers)
            self.use(self.buffers[0])
            total = sum(weight for _, weight in losses)
            self.epochs.append({"loss": sum(loss * weight for loss, weight in losses) / total} | self.evaluate())
            if self.job.scheduler_interval == "epoch":
                self.scheduler.step()
        return {**{n: p.detach() for n, p in self.named.items()}, **self.own_buffers()}

    def update(self, epoch: int, group: list[tuple[int, Tensor]]) -> list[tuple[float, float]]:
        """(loss, weight) of each minibatch of the group."""
        taken = [self.data.train[chosen] for _, chosen in group]
        weigh = self.job.loss_weight
        weights = [1.0 if weigh is None else float(weigh(target)) for _, target in taken]
        losses = []
        for (number, _), (inputs, target), weight in zip(group, taken, weights, strict=True):
            taken_by = [replica for replica, share in enumerate(self.case.shares) for _ in range(share)]
            taken_by = taken_by or [*range(self.case.replicas)]
            own = self.buffers[taken_by[number % len(taken_by)]]
            self.use(own)
            seed_forward(0, epoch, number, 0)
            loss = self.loss(self.model(inputs), target)
            (loss * weight / sum(weights)).backward()
            losses.append((float(loss.detach()), weight))
            own |= {name: buffer.clone() for name, buffer in self.own_buffers().items()}
        for name, hooks in self.hooks.items():
            for hook in hooks:
                self.trained[name].grad = hook(self.trained[name].grad)
        assert self.job.clip_norm is not None
        torch.nn.utils.clip_grad_norm_([*self.trained.values()], self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.job.scheduler_interval == "minibatch":
            for _ in group:
                self.scheduler.step()
        return losses

    def evaluate(self) -> dict[str, float]:
        self.model.eval(), self.loss.eval()
        with torch.no_grad():
            total = weights = rights = 0.0
            for start in range(0, TEST_SAMPLES, MINIBATCH):
                inputs, target = self.data.test[start : start + MINIBATCH]
                weight = len(target) if self.job.loss_weight is None else float(self.job.loss_weight(target))
                output = self.model(inputs)
                total, weights = total + float(self.loss(output, target)) * weight, weights + weight
                rights += float(self.job.metrics["right"](output, target)) * len(target)
        self.model.train(), self.loss.train()
        return {"test_loss": total / weights, "right": rights / TEST_SAMPLES}


def assert_equal_to_one_process(case: Case, run: Path, epochs: int, but: tuple[str, ...] = ()) -> None:
    """`but`: names of the state that is left out."""
    literal = Literal(case)
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
