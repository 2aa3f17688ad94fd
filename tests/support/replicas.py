"""Processes that average among themselves, and a small model that they train.

The model has what a mean must cope with: a tied parameter, one that no minibatch uses, one that only some use, one
with a single number, one of another type, and two that are complex.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from worker_host import start_workers

from pipeplan_launch.comm.buckets import BucketExchange, UpdateGroup
from pipeplan_launch.comm.gradient_allreduce import GradientReducer

WIDTH, RATE = 12, 0.1
Minibatch = tuple[Tensor, float, bool]
"""(inputs, share of a whole minibatch, whether it uses the parameter that only some use)."""
Group = Sequence[Sequence[Minibatch]]
"""By replica, its minibatches of one update."""


def run(world: int, call: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `call(rank, *arguments)` returns in each of so many processes, which have a process group."""
    given = [(rank, world, str(folder), call, arguments) for rank in range(world)]
    ended = start_workers(_work, given, folder, hung_after_s=20).finish()
    assert ended.statuses == [0] * world, ended.err
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(world)]


def _work(rank: int, world: int, folder: str, call: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    dist.barrier()  # a rank that ends at once would break the connections that another is still making
    torch.save(call(rank, *arguments), Path(folder) / f"result-{rank}.pt")
    dist.barrier()  # nobody leaves while another may still want to hear from it


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.sometimes = nn.Parameter(torch.ones(WIDTH, WIDTH) / WIDTH)
        self.number = nn.Parameter(torch.tensor(0.5))
        self.precise = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.waves = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.phase = nn.Parameter(torch.tensor(0.5 + 0.25j))

    def forward(self, inputs: Tensor, sometimes: bool) -> Tensor:
        x = self.tied(torch.tanh(self.first(inputs)))
        if sometimes:
            x = x + inputs @ self.sometimes
        x = x + (inputs.to(self.waves.dtype) @ self.waves * self.phase).abs()
        x = self.tied(torch.tanh(x)) * self.number * self.precise.float()
        return x.square().mean() + self.empty.sum()


def groups(world: int, updates: int, seed: int = 0, each: int = 1) -> list[Group]:
    """`each` minibatches a replica and update; in the last update one is short and a replica has none."""
    generator = torch.Generator().manual_seed(seed)

    def minibatch(update: int, replica: int) -> Minibatch:
        return torch.randn(5, WIDTH, generator=generator), 1.0, (update + replica) % 3 == 0

    made = [[[minibatch(update, r) for _ in range(each)] for r in range(world)] for update in range(updates)]
    inputs, _, uses = made[-1][0][-1]
    made[-1][0][-1] = (inputs[:2], 0.4, uses)
    made[-1][world - 1] = []
    return list(made)


def train(rank: int, given: Sequence[Group], bucket_bytes: int, early: bool, exchange: Any) -> dict[str, Tensor]:
    """Train by the reducer, as one replica. `early`: gradients leave while backward goes on.

    `exchange`: given the group and the parameters, another way to average.
    """
    model = Model()
    parameters = dict(model.named_parameters())
    group: Any = dist.group.WORLD
    other: BucketExchange | None = None if exchange is None else exchange(group, parameters)
    reducer = GradientReducer(parameters, group, other, bucket_bytes=bucket_bytes)
    for number, update in enumerate(given):
        total = sum(share for replica in update for _, share, _ in replica)
        of = UpdateGroup(total, number, ends_segment=number == len(given) - 1)
        for position, (inputs, share, uses) in enumerate(update[rank]):
            final = of if early and position == len(update[rank]) - 1 else None
            with reducer.backward(parameters, share, final):
                model(inputs, uses).backward()
            reducer.add({n: p.grad for n, p in parameters.items() if p.grad is not None}, share)
            model.zero_grad()
        reducer.start(of)
        step(parameters, reducer.finish())
    return {name: parameter.detach() for name, parameter in parameters.items()}


def train_literally(given: Sequence[Group]) -> dict[str, Tensor]:
    """One process: the mean over all samples of the group; what no minibatch uses has no gradient."""
    model = Model()
    parameters = dict(model.named_parameters())
    for update in given:
        step(parameters, mean_gradients(model, [one for replica in update for one in replica]))
    return {name: parameter.detach() for name, parameter in parameters.items()}


def mean_gradients(model: nn.Module, minibatches: Sequence[Minibatch]) -> dict[str, Tensor]:
    total = sum(share for _, share, _ in minibatches)
    mean: dict[str, Tensor] = {}
    for inputs, share, uses in minibatches:
        model.zero_grad()
        model(inputs, uses).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                mean[name] = mean.get(name, 0.0) + parameter.grad * (share / total)
    model.zero_grad()
    return mean


def step(parameters: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    """Gradient descent, with decay of the weights that have a gradient: so that a zero is not the same as none."""
    with torch.no_grad():
        for name, gradient in gradients.items():
            parameters[name].mul_(0.99).sub_(gradient, alpha=RATE)
