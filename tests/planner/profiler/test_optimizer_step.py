"""The optimiser's step by layer, its state, and the peak memory of a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from long_chains import Ticks
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.optimizer_step import measure_steps, optimizer_state, split_step_time
from pipeplan_launch import Job, StageInfo, muon
from pipeplan_launch.errors import LaunchError


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    made[2].weight.requires_grad_(False)
    return made


def own(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {str(index): (f"{index}.weight", f"{index}.bias") for index in range(3)}


def job(optimizer: Any, made: nn.Module) -> Job:
    return Job(made, inputs=lambda n: torch.ones(n, 3), optimizer=optimizer)


def backward(made: nn.Module) -> Callable[[], None]:
    return lambda: made(torch.ones(4, 3)).sum().backward()


class Counting(SGD):
    """A step takes 7, 99 for each parameter, and 1 for each of its numbers."""

    stepped = 0

    def step(self, closure: Any = None) -> None:
        Counting.stepped += 7 + sum(99 + one.numel() for group in self.param_groups for one in group["params"])
        super().step()


CLOCK = Ticks(lambda: Counting.stepped)


def test_layers_get_their_shares_of_the_whole_step() -> None:
    made = model()
    found = measure_steps(job(lambda ps: Counting(ps, lr=0.1), made), 4, own(made), CLOCK, backward(made), [])
    # 20, 12 and (weights frozen) 2 numbers in 5 parameters.
    assert found.update_s == pytest.approx({"0": 198 + 20, "1": 198 + 12, "2": 99 + 2}, rel=1e-2)
    assert sum(found.update_s.values()) == pytest.approx(34 + 5 * 99)
    assert found.fixed_s == pytest.approx(7)
    # If each parameter alone would take longer than its share, they share the step alike.
    layers = {
        name: [(f"{name}.{i}", nn.Parameter(torch.zeros(n))) for i in range(n)] for name, n in (("a", 1), ("b", 2))
    }
    assert split_step_time(6.0, layers, 1.0) == {"a": 1 + 3 / 5, "b": 2 + 3 * 4 / 5}
    assert split_step_time(6.0, layers, 9.0) == {"a": 2.0, "b": 4.0}


def test_an_optimiser_that_wants_the_whole_model_is_shared_by_bytes() -> None:
    made = model()

    def picky(parameters: list[nn.Parameter], stage: StageInfo) -> SGD:
        names = [name for name, _ in stage.named_parameters]
        return Counting([{"params": [parameters[names.index("0.weight")]]}, {"params": parameters[1:]}], lr=0.1)

    found = measure_steps(job(picky, made), 4, own(made), CLOCK, backward(made), [])
    whole = 7 + 5 * 99 + 34
    assert found.update_s == pytest.approx({"0": whole * 20 / 34, "1": whole * 12 / 34, "2": whole * 2 / 34})


class Stuck(SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("no step")


class Wide(nn.Module):
    """4 MiB of weights, and as much in each activation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(8, 1 << 17))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.table).exp().cos()).sum()


def test_the_peak_holds_weights_gradients_state_and_what_is_kept() -> None:
    made = Wide()
    peaked = job(lambda ps: Adam(ps, lr=0.0, foreach=False), made)
    once: Callable[[], None] = lambda: made(torch.ones(1, 1 << 17)).backward()  # noqa: E731
    peak = measure_steps(peaked, 1, {"all": ("table",)}, CPUClock(1), once, []).peak_bytes
    mib = 4 << 20
    # Weights and two moments; then what exp and cos keep, and backwards the sine, its negative or product, one more.
    assert 3 * mib + 4 * mib <= peak <= 3 * mib + 4.2 * mib


def two_kinds() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))


def by_name(parameters, stage: StageInfo) -> AdamW:
    decayed = [one for name, one in stage.named_parameters if name.endswith("weight")]
    others = [one for name, one in stage.named_parameters if not name.endswith("weight")]
    return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


def test_bytes_of_state() -> None:
    for optimizer, expected in (
        (by_name, ("AdamW", 2.0, True)),
        (lambda parameters, stage: SGD(parameters, lr=0.1 * stage.minibatches_per_update), ("SGD", 0.0, True)),
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), ("SGD", 1.0, True)),
        (AdamW, ("AdamW", 2.0, True)),
        (muon(), ("MuonWithAdamW", (9 + 2 * 9) / 18, False)),  # a matrix of 9 elements, vectors of 9 together
    ):
        assert optimizer_state(job(optimizer, two_kinds())) == expected


def test_nothing_is_trained_and_an_optimiser_that_fails_is_one_line() -> None:
    made = model().requires_grad_(False)
    found = measure_steps(job(None, made), 4, own(made), CPUClock(1), lambda: None, [])
    assert (found.update_s, found.peak_bytes) == ({}, 0)
    made = model()
    with pytest.raises(LaunchError, match="a step of the job's optimizer failed: ArithmeticError: no step"):
        measure_steps(job(Stuck, made), 4, own(made), CPUClock(1), backward(made), [])
    with pytest.raises(LaunchError, match=r"the job's optimizer failed: KeyError.*test_optimizer_step\.py"):
        optimizer_state(job(lambda parameters: {}["lr"], two_kinds()))
