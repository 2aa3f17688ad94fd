"""Which optimisers may be cut into parts, and how parts and state are laid out; runs are in `test_semantics`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import run
from torch import nn, optim
from torch.optim import Optimizer

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.run_options import GradientAveraging, check_averaging_options, transport_of
from pipeplan_launch.runtime import optimizer_shards
from pipeplan_launch.runtime.optimizer_shards import ELEMENTWISE, OptimizerShards


class OwnAdam(optim.Adam):
    """An optimiser that is not torch's own."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process the replica of a number among so many, without a process group."""

    def place(index: int, count: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda _group: index)
        monkeypatch.setattr(dist, "get_world_size", lambda _group: count)

    return place


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"matrix": (3, 5), "bias": (2,), "scale": (), "none": (0, 4)}
    made = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    return {**made, "waves": nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))}


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_steps_of_all_parts_are_the_step_of_the_whole(
    kind: Callable[..., Optimizer], alone: Callable[[int, int], None]
) -> None:
    """Three steps by each of four replicas, whose parts are put together by hand."""
    gradients = [{name: torch.randn_like(one) for name, one in parameters().items()} for _ in range(3)]
    whole = parameters()
    reference = kind(whole.values(), lr=0.1)
    for step in gradients:
        for name, gradient in step.items():
            whole[name].grad = gradient.clone()
        reference.step()
    parts: list[dict[str, nn.Parameter]] = []
    for index in range(4):
        alone(index, 4)
        own = parameters()
        optimizer = kind(own.values(), lr=0.1)
        shards = OptimizerShards(own, optimizer, object())  # type: ignore[arg-type]
        for step in gradients:
            shards.take(step)
            optimizer.step()
        parts.append(dict(shards.parameters))
    for name, expected in whole.items():
        found = parts[0][name] if name == "scale" else torch.cat([one[name] for one in parts]).view(expected.shape)
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-14, atol=1e-14)
    assert [one["matrix"].numel() for one in parts] == [4, 4, 4, 3]
    assert [one["bias"].numel() for one in parts] == [1, 1, 0, 0]


def test_hooks_on_the_step_are_refused(alone: Callable[[int, int], None]) -> None:
    alone(0, 2)
    own = parameters()
    optimizer = optim.Adam(own.values())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(LaunchError, match="which its step hooks would meet in place of whole ones"):
        OptimizerShards(own, optimizer, object())  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [OwnAdam, optim.Adafactor, optim.LBFGS], ids=lambda make: make.__name__)
def test_other_optimisers_are_refused(make: Any, alone: Callable[[int, int], None]) -> None:
    alone(0, 2)
    own = parameters()
    with pytest.raises(LaunchError, match=f"the job's optimiser is {make.__name__}, and it takes torch's SGD, Adam"):
        OptimizerShards(own, make(own.values()), object())  # type: ignore[arg-type]


def test_options_that_exclude_it() -> None:
    sharded = GradientAveraging(shards_optimizer=True)
    check_averaging_options(sharded)
    with pytest.raises(LaunchError, match="--significance needs the optimiser's state of every weight"):
        check_averaging_options(GradientAveraging(significance=0.1, shards_optimizer=True))
    plan: Any = type("Plan", (), {"pipeline": (0, 1), "device": "cuda", "servers": 1})
    assert transport_of("auto", plan, sharded, "nccl") == "gloo"
    with pytest.raises(LaunchError, match="give --transport gloo, or leave --shard-optimizer out"):
        transport_of("nccl", plan, sharded)


def _trained(rank: int, large_bytes: int) -> dict[str, torch.Tensor]:
    """Three steps by one replica of three, with the weights gathered in place from so many bytes on."""
    optimizer_shards.LARGE_BYTES = large_bytes
    own = parameters() | {"turned": nn.Parameter(torch.arange(35.0, dtype=torch.float64).view(5, 7).t())}
    optimizer = optim.AdamW(own.values(), lr=0.1)
    group: Any = dist.group.WORLD
    shards = OptimizerShards(own, optimizer, group)
    for number in range(3):
        shards.take({name: (one.detach() * number + 1.5).cos() for name, one in own.items()})
        optimizer.step()
        shards.gather(own)
    return {name: one.detach() for name, one in own.items()}


def test_weights_are_gathered_in_place_and_through_a_buffer_alike(tmp_path: Path) -> None:
    found = [result for size in (0, 1 << 30) for result in run(3, _trained, _made(tmp_path / str(size)), size)]
    for name, expected in found[0].items():
        assert all(torch.equal(one[name], expected) for one in found), name


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
