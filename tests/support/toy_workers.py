"""Worker processes for tests that run a small model without tracing it.

The toy has three layers. The first sends on a hidden tensor, a tensor that only the third needs, and whole numbers;
there is dropout, and the second layer has buffers as BatchNorm has.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from schedule_rules import depths_for as depths
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset
from toy_jobs import FEATURES, LOSSES, Fault, plant
from worker_host import Ended, start_attempt

from pipeplan_launch.elastic import restart_state
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.rank_mapping.host_identity import SERVER_VARIABLE
from pipeplan_launch.tracing.split import StateDictNames

WIDTH, CLASSES = 6, 4
HASH = "sha256:toy"
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.2, momentum=0.9, foreach=False),
    "sgd-fused": lambda p: SGD(p, lr=0.2, momentum=0.9, fused=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.02, fused=True),
}


@dataclass(frozen=True)
class Toy:
    """What a test varies."""

    optimizer: str = "sgd"
    samples: int = 40
    dynamic: bool = True
    fail_rank: int | None = None
    """The rank whose loading fails with a LaunchError."""
    die: tuple[int, int] | None = None
    """(rank, minibatch of its own) at which that process ends at once."""
    loss: str = "cross-entropy"
    """Key of `LOSSES`."""
    freeze: bool = False
    """At `die`, stop answering instead."""
    other_data_rank: int | None = None
    """The rank whose data has other samples."""
    fault: Fault | None = None
    test_samples: int = 23
    features: str = ""
    """Key of `FEATURES`."""


@dataclass(frozen=True)
class Cut:
    """A tensor between layers."""

    name: str
    width: int
    dtype: torch.dtype = torch.float64
    requires_grad: bool = True

    def shape(self, batch: int) -> tuple[int, ...]:
        return (batch, self.width)


CUTS = (
    (),
    (Cut("hidden", WIDTH), Cut("skip", 3), Cut("number", 1, torch.int64, False)),
    (Cut("hidden2", WIDTH), Cut("skip", 3), Cut("number", 1, torch.int64, False)),
    (),
)


def initial() -> list[dict[str, Tensor]]:
    """The weights of the three layers, by name."""
    generator = torch.Generator().manual_seed(5)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) / 2

    return [
        {"one.weight": make(WIDTH, WIDTH), "one.bias": make(WIDTH)},
        {"two.weight": make(WIDTH, WIDTH), "two.unused": make(2)},
        {"three.weight": make(CLASSES, WIDTH + 3)},
    ]


def initial_buffers() -> list[dict[str, Tensor]]:
    return [{}, {"two.mean": torch.zeros(WIDTH, dtype=torch.float64), "two.calls": torch.tensor(0)}, {}]


def run_layer(
    layer: int, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], given: Sequence[Tensor], training: bool
) -> tuple[Tensor, ...]:
    """One layer of the toy; `given` is what the cut before it holds, or the model's input."""
    if layer == 0:
        (x,) = given
        hidden = torch.tanh(functional.linear(x, weights["one.weight"], weights["one.bias"]))
        number = (x[:, :1] > 0).long()
        return functional.dropout(hidden, 0.3, training), hidden[:, :3] * 2, number
    if layer == 1:
        hidden, skip, number = given
        if training:
            buffers["two.mean"].mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            buffers["two.calls"].add_(1)
        hidden = torch.tanh(functional.linear(hidden, weights["two.weight"]))
        return functional.dropout(hidden - 0.01 * buffers["two.mean"], 0.3, training), skip, number
    hidden, skip, number = given
    return (functional.linear(torch.cat([hidden, skip * (1 + number)], 1), weights["three.weight"]),)


class ToyStage(nn.Module):
    """Some consecutive layers of the toy, as the engine wants a stage."""

    def __init__(self, layers: Sequence[int], die_at: int | None = None, freeze: bool = False) -> None:
        super().__init__()
        self.layers = list(layers)
        self.receives, self.sends = CUTS[layers[0]], CUTS[layers[-1] + 1]
        self.model_inputs = (0,) if layers[0] == 0 else ()
        self.shared: dict[str, tuple[int, ...]] = {}
        self._weights = {n: nn.Parameter(w) for layer in layers for n, w in initial()[layer].items()}
        self._state = {n: b for layer in layers for n, b in initial_buffers()[layer].items()}
        self.naming = StateDictNames({name: name for state in (*initial(), *initial_buffers()) for name in state})
        self._die_at, self._freeze = die_at, freeze
        self._calls = 0

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return self._weights

    def buffers_by_name(self) -> dict[str, Tensor]:
        return self._state

    def changing_state(self) -> dict[str, Tensor]:
        return self._state

    def call(
        self, parameters: Mapping[str, Tensor], received: Sequence[Tensor], inputs: Sequence[Tensor], batch: int
    ) -> Any:
        if self._calls == self._die_at:
            while self._freeze:
                time.sleep(1)
            os._exit(9)
        self._calls += 1
        state = {name: parameters.get(name, own) for name, own in self._state.items()}
        given: tuple[Tensor, ...] = tuple(received) if self.receives else tuple(inputs)
        assert all(len(tensor) == batch for tensor in given)
        for layer in self.layers:
            given = run_layer(layer, parameters, state, given, self.training)
        return given if self.sends else given[0]


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def toy_data(toy: Toy) -> Data:
    inputs, targets = samples(toy.samples + toy.test_samples)
    return Data(
        TensorDataset(inputs[: toy.samples], targets[: toy.samples]),
        TensorDataset(inputs[toy.samples :], targets[toy.samples :]),
    )


def toy_job(toy: Toy) -> Job:
    job = Job(
        nn.Module(),
        loss=LOSSES[toy.loss],
        data=lambda: toy_data(toy),
        optimizer=OPTIMIZERS[toy.optimizer],
    )
    return FEATURES[toy.features](job)


def split_layers(stages: int) -> list[list[int]]:
    """The toy's three layers over so many stages."""
    return {1: [[0, 1, 2]], 2: [[0, 1], [2]], 3: [[0], [1], [2]]}[stages]


STAGE = {"format": "pipeplan-stage", "version": 1, "plan": "sha256:plan", "device": "cpu", "servers": 1}
"""Part of a stage file."""


def stage_contents(
    replicas: Sequence[int],
    depth: Sequence[int] | None = None,
    minibatch: int = 2,
    mode: str = "training",
    idle: int = 0,
    recompute: Sequence[bool] = (),
    schedule: str = "1f1b-stashing",
    accumulate: int | None = None,
) -> list[dict[str, Any]]:
    """Stage files for the toy, one object a stage."""
    if depth is None:
        depth = [-(-accumulate // r) for r in replicas] if schedule == "gpipe" and accumulate else depths(replicas)
    pipeline, first = [], idle  # idle workers come first, so that ranks and places differ
    for count, deep in zip(replicas, depth, strict=True):
        pipeline.append({"workers": list(range(first, first + count)), "depth": deep, "versions": deep})
        if schedule == "zb-h1":  # the first stage defers nothing, and each later one a minibatch more
            pipeline[-1]["deferred"] = len(pipeline) - 1
        first += count
    for placement, again in zip(pipeline, recompute, strict=False):
        placement["recompute"] = again
    shared = STAGE | {
        "mode": mode,
        "model": {"ref": "toy", "graph_hash": HASH},
        "minibatch": minibatch,
        "workers_per_server": first,
        "schedule": {"name": schedule if mode == "training" else "forward-only", "accumulate": accumulate},
        "pipeline": pipeline,
        "prediction": {"minibatch_s": 0.01, "forward_s": 0.002, "backward_s": 0.004, "memory_bytes": 1000},
    }
    names = [[f"layer{layer}" for layer in layers] for layers in split_layers(len(replicas))]
    return [shared | {"stage": stage, "layers": layers} for stage, layers in enumerate(names)]


def write_plan(folder: Path, contents: Sequence[dict[str, Any]]) -> Path:
    """Write stage files into a plan folder."""
    (folder / "stages").mkdir(parents=True, exist_ok=True)
    for content in contents:
        (folder / "stages" / f"stage-{content['stage']}.json").write_text(json.dumps(content))
    return folder


def run_plan(folder: Path, arguments: Sequence[str], toy: Toy, world: int) -> Ended:
    """Run a plan's workers to their end, as torchrun would."""
    given = [(rank, [str(folder), *arguments], toy) for rank in range(world)]
    unawaited = [toy.die[0]] if toy.die is not None and toy.freeze else []
    return start_attempt(toy_worker, given, folder, unawaited=unawaited).finish()


def run_toy(folder: Path, toy: Toy, replicas: Sequence[int], *arguments: str, **plan: Any) -> Ended:
    """Run a plan of the toy in `folder / "run"`, unless the arguments name another folder, to its end."""
    write_plan(folder, stage_contents(replicas, **plan))
    chosen = () if "--run-dir" in arguments else ("--run-dir", str(folder / "run"))
    return run_plan(folder, [*chosen, *arguments], toy, sum(replicas) + plan.get("idle", 0))


def toy_worker(rank: int, arguments: list[str], toy: Toy) -> int:
    """Be one worker: the executor's own `main`, with the toy for a model."""
    from pipeplan_launch import __main__
    from pipeplan_launch.errors import LaunchError
    from pipeplan_launch.plan.launch_plan import LaunchPlan
    from pipeplan_launch.runtime import stage_setup

    def load_stages(
        plan: LaunchPlan, stages: Sequence[int], _seed: int, _device: torch.device, _check: object
    ) -> tuple[Any, list[Any], str, bool]:
        (stage,) = stages
        if toy.fail_rank == rank:
            raise LaunchError(f"rank {rank} cannot\nload")
        die_at = toy.die[1] if toy.die is not None and toy.die[0] == rank else None
        layers = split_layers(len(plan.pipeline))[stage]
        mine = replace(toy, samples=toy.samples - 1) if toy.other_data_rank == rank else toy
        program = ToyStage(layers, die_at, toy.freeze)
        return plant(toy.fault, stage, toy_job(mine), program), [program], HASH, toy.dynamic

    stage_setup.load_stages = load_stages  # type: ignore[assignment]
    return __main__.main([*arguments, "--threads", "1"])


def run_attempts(
    folder: Path,
    arguments: Sequence[str],
    toys: Sequence[Toy],
    world: int,
    cut_off: tuple[int, int] | None = None,
    servers: Sequence[Sequence[str]] = (),
) -> list[Ended]:
    """One attempt of a launch for each toy, each with all workers of the plan in `folder`: what torchrun does, faster.

    The workers of all attempts share one store, and a folder that stands for the launcher's.

    `cut_off`: (rank, at which call of its stage) in the first attempt all connections of that worker are cut.
    `servers`: for each attempt, the name of the server that each process is on, if not all are on this machine.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = folder / "launcher"
    shutil.rmtree(launcher, ignore_errors=True)
    launcher.mkdir()
    ended = []
    for attempt, toy in enumerate(toys):
        environment = {
            restart_state.VARIABLE: str(launcher),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(len(toys) - 1),
        }
        apart: Sequence[dict[str, str]] = [{}] * world
        if servers:
            apart = [{SERVER_VARIABLE: server, "GLOO_SOCKET_IFNAME": "lo"} for server in servers[attempt]]
        cuts = dict([cut_off] if cut_off and attempt == 0 else [])
        workers = start_attempt(
            _worker,
            [(cuts.get(rank), rank, [str(folder), *arguments], toy) for rank in range(world)],
            folder,
            store=store,
            variables=[environment | one for one in apart],
            name=f"attempt-{attempt}-worker",
        )
        ended.append(workers.finish())
    return ended


def _worker(cut_at: int | None, rank: int, arguments: list[str], toy: Toy) -> int:
    inner, calls = ToyStage.call, itertools.count()

    def call(*given: Any) -> Any:
        if next(calls) == cut_at:
            _cut_connections()
        return inner(*given)

    ToyStage.call = call  # type: ignore[method-assign]
    return toy_worker(rank, arguments, toy)


def _cut_connections() -> None:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            connection.getpeername()  # OSError for one that listens
            connection.shutdown(socket.SHUT_RDWR)
