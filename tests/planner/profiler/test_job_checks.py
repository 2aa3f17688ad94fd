"""What a profile says of its job: remarks, the reading of samples, and the optimiser's step and state."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from long_chains import Ticks
from state_jobs import REFUSED, REMARKED, SOUND
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import Dataset

from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler import job_checks
from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.job_checks import reading_s
from pipeplan.profiler.optimizer_step import measure_steps, optimizer_state, split_step_time
from pipeplan.profiler.remarks import layer_sum_remarks, promise_remarks, tie_remarks, unread_parameter_remarks
from pipeplan_launch import Job, StageInfo, muon
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Data
from pipeplan_launch.tracing.trace import trace_job


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, around another layer."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.words(ids)).relu())


def test_parameters_that_no_output_depends_on_are_named_and_layers_that_do_not_add_up() -> None:
    def unread(model: nn.Module) -> list[str]:
        return unread_parameter_remarks(trace_job(Job(model, inputs=lambda n: torch.randn(n, 2)), 3))

    (said,) = unread(Half())
    assert said.endswith("unused.weight, unused.bias")
    assert not unread(nn.Linear(2, 2))
    layers = (Layer("a", 0.25, 0.5, 0, 0), Layer("b", 0.75, 1.5, 0, 0))
    for whole, says in (
        ((), []),
        ((1.0, 2.0), []),
        ((0.8, 2.0), ["1.25 of it forward"]),
        ((1.0, 2.5), ["0.80 of it backward"]),
    ):
        found = layer_sum_remarks(Size(1, layers, (), *whole))
        assert len(found) == len(says)
        assert all(part in found[0] for part in says)


def test_tied_weights_are_named_with_what_they_mean_for_cuts() -> None:
    def ties(*, tied: bool) -> list[str]:
        return tie_remarks(trace_job(Job(Tied(tied=tied), inputs=lambda n: torch.zeros(n, 3, dtype=torch.long)), 3))

    assert ties(tied=False) == []
    (said,) = ties(tied=True)
    assert said == (
        "'words' and 'head' have the weights words.weight = head.weight in common and stay in one stage with the "
        "2 layers between them; 1 layer can be in other stages; under a synchronous schedule (1f1b-flush, "
        "gpipe) they may be in several stages, each with a copy of the weights"
    )


def remarks(make: Callable[[], Job]) -> list[str]:
    torch.manual_seed(0)
    job = make()
    return promise_remarks(job, trace_job(job, 16), job.example_batch(16))


def test_what_one_process_would_do_otherwise_is_refused_or_said() -> None:
    for make, says in REFUSED.values():
        with pytest.raises(LaunchError, match=says):
            remarks(make)
    for name, make in SOUND.items():
        assert remarks(make) == [], name
    for make, says in REMARKED.values():
        (remark,) = remarks(make)
        assert re.search(says, remark)


def test_the_model_and_the_generators_are_left_as_they_were() -> None:
    job = SOUND["plain"]()
    job.model.last = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 3))
    traced, batch = trace_job(job, 16), job.example_batch(16)
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    random = torch.get_rng_state()
    promise_remarks(job, traced, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())


class Counted(Dataset[Any]):
    """Samples that note when they are read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return torch.zeros(1), torch.zeros(())


def ticks(data: Counted) -> Ticks:
    """A clock by which a sample takes a second to read."""
    return Ticks(lambda: len(data.read))


def job_of(data: Data) -> Job:
    return Job(nn.Linear(1, 1), data=lambda: data)


def test_whole_minibatches_of_shuffled_samples_are_read_but_slow_data_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, evictions = Counted(40), []
    assert reading_s(job_of(Data(data)), 8, ticks(data), lambda: evictions.append(len(data.read))) == 8.0
    assert len(data.read) == 8 * len(evictions)
    assert evictions == sorted(evictions)
    assert sorted(data.read[:40]) == list(range(40)) != data.read[:40]
    monkeypatch.setattr(job_checks, "MOST_S", 0.0)
    data = Counted(12)
    assert reading_s(job_of(Data(data)), 4, ticks(data), lambda: None) == len(data.read) == 4


def test_nothing_is_charged_where_the_worker_reads_nothing_and_more_for_a_larger_minibatch() -> None:
    bare = Job(nn.Linear(1, 1), inputs=lambda count: torch.zeros(count, 1))
    for job in (bare, job_of(Data(Counted(40), processes=2)), job_of(Data(Counted(3)))):
        assert reading_s(job, 8, CPUClock(1), lambda: None) == 0.0
    profile = Profile((Layer("l", 1.0, 1.0, 4, 4),), (), 8, read_s=0.5)
    assert profile.rescaled(24).read_s == pytest.approx(1.5)
    assert replace(profile, read_s=0.0).to_json().get("read_s") is None


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
    with pytest.raises(LaunchError, match=r"the job's optimizer failed: KeyError.*test_job_checks\.py"):
        optimizer_state(job(lambda parameters: {}["lr"], two_kinds()))
