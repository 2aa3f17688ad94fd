"""Learning rates, clipping, the correction of steps, and presets; over several stages: `test_training_features`."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, lr_scheduler

from pipeplan_launch import Job, StageInfo, nesterov_for_stashing, rate_by_delay
from pipeplan_launch.checkpoint.optimizer_state import load_optimizer, merge_optimizer_states, optimizer_state
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.stage_optimizer import GradientClipping, LearningRates
from pipeplan_launch.runtime.step_correction import StepCorrection, make_correction

SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 4, gamma=0.7),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 17, eta_min=1e-3),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=40),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=5),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        milestones=[5],
    ),
}


MOMENTUM = partial(SGD, momentum=0.9)


def job(**more: Any) -> Job:
    return Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), **more)


def made(job: Job, optimizer: Any = MOMENTUM) -> tuple[Any, LearningRates]:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    built = optimizer([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.05}], lr=0.1)
    return built, LearningRates(job, built, StageInfo())


def settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", [MOMENTUM, AdamW], ids=["SGD", "AdamW"])
def test_all_stages_have_the_same_rate_for_the_same_minibatch(name: str, optimizer: Any) -> None:
    """Whatever an update covers; as torch's own scheduler has it after as many steps."""
    alone = optimizer(
        [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))], "lr": 0.05}], lr=0.1
    )
    reference, expected = SCHEDULERS[name](alone), []
    for _ in range(31):
        expected.append(settings(alone))
        alone.step()
        reference.step()
    for size in (1, 2, 3):
        ours, rates = made(job(scheduler=SCHEDULERS[name], scheduler_interval="minibatch"), optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for minibatch in range(0, 30, size):
                assert settings(ours) == expected[minibatch]
                ours.step()
                rates.after_update(size)
                rates.after_epoch(0.5)
        assert settings(ours) == expected[30]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_catches_up_without_a_word_of_torch(name: str) -> None:
    scheduled = job(scheduler=SCHEDULERS[name], scheduler_interval="minibatch")
    whole, rates = made(scheduled)
    for _ in range(33):
        whole.step()
        rates.after_update(1)
    part, rates = made(scheduled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates.catch_up(20, [None, None])
        for _ in range(13):
            part.step()
            rates.after_update(1)
    assert settings(part) == settings(whole)
    before = settings(made(job())[0])
    changed = {key for one, old in zip(settings(part), before, strict=True) for key in one if one[key] != old.get(key)}
    assert changed <= rates.keys, "a checkpoint brings nothing that the scheduler decides"


def test_per_epoch() -> None:
    ours, rates = made(job(scheduler=SCHEDULERS["step"]))
    rates.after_update(5)
    assert rates.current == 0.1
    for _ in range(4):
        ours.step()
        rates.after_epoch(None)
    assert rates.current == pytest.approx(0.07)


PLATEAU = job(scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1))
LOSSES = [1.0, 0.9, None, 0.95, float("nan"), 0.97, 0.99, 0.99]


def test_plateau_follows_the_test_loss() -> None:
    """Epochs that were not evaluated do not count; neither does a loss that is not a number."""
    ours, rates = made(PLATEAU)
    ours.step()
    seen = []
    for loss in LOSSES:
        rates.after_epoch(loss)
        seen.append(rates.current)
    assert seen == [0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025]
    _, again = made(PLATEAU)
    again.catch_up(99, LOSSES[:4])
    for loss in LOSSES[4:]:
        again.after_epoch(loss)
    assert again.current == rates.current
    assert rates.needs_test_loss


def test_a_rate_that_is_a_tensor() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=torch.tensor(0.1), fused=True)
    rates = LearningRates(job(scheduler=SCHEDULERS["lambda"], scheduler_interval="minibatch"), optimizer, StageInfo())
    rates.catch_up(3, [])
    assert rates.current == pytest.approx(0.025)
    assert "lr" in rates.keys


def test_errors() -> None:
    with pytest.raises(LaunchError, match="follows the test loss, once an epoch"):
        made(job(scheduler=lr_scheduler.ReduceLROnPlateau, scheduler_interval="minibatch"))
    with pytest.raises(LaunchError, match=r"must return a scheduler of torch\.optim\.lr_scheduler, not SGD"):
        made(job(scheduler=lambda optimizer: optimizer))
    with pytest.raises(LaunchError, match=r"the job's scheduler failed: ZeroDivisionError.*test_stage_optimizer\.py"):
        made(job(scheduler=lambda optimizer: 1 / 0))
    _, rates = made(job(scheduler=SCHEDULERS["one-cycle"], scheduler_interval="minibatch"))
    with pytest.raises(LaunchError, match="the job's scheduler failed: ValueError: Tried to step 41 times"):
        rates.catch_up(41, [])


def test_without_a_scheduler_a_checkpoint_decides() -> None:
    assert made(job())[1].keys == frozenset()
    assert made(job(scale_lr="linear"))[1].keys == {"lr"}
    assert made(job(optimizer=lambda parameters, stage: SGD(parameters, lr=1.0)))[1].keys == {"lr"}


def test_a_checkpoint_of_two_stages_with_rates_of_their_own() -> None:
    """Their parameters meet in one group under another plan, with a rate of its own; torch may be given names."""
    saved = []
    for name, rate in (("a", 0.2), ("b", 0.1)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = SGD([(name, parameter)], lr=rate, momentum=0.9)
        LearningRates(job(scheduler=SCHEDULERS["lambda"]), optimizer, StageInfo())
        parameter.grad = torch.full((2,), rate)
        optimizer.step()
        saved.append(optimizer_state(optimizer, {name: parameter}))
    tensors = saved[0][1] | saved[1][1]
    both = {name: nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizer = SGD(list(both.items()), lr=0.4, momentum=0.9)
    rates = LearningRates(job(scheduler=SCHEDULERS["lambda"]), optimizer, StageInfo())

    def load(own: frozenset[str]) -> None:
        whole = merge_optimizer_states(content for content, _ in saved)
        load_optimizer(optimizer, both, whole, lambda names: {name: tensors[name] for name in names}, "here", own)

    with pytest.raises(LaunchError, match=r"were saved with '(initial_)?lr'"):
        load(frozenset())
    load(rates.keys)
    assert rates.current == 0.4
    assert [optimizer.state[both[name]]["momentum_buffer"][0].item() for name in "ab"] == pytest.approx([0.2, 0.1])


def gradients(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), ())]


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1e3])
def test_equals_torchs_own(scale: float) -> None:
    """Also where the norm is below the limit: then nothing changes."""
    parameters = [nn.Parameter(torch.zeros_like(one)) for one in gradients(scale)]
    for parameter, gradient in zip(parameters, gradients(scale), strict=True):
        parameter.grad = gradient
    expected = clip_grad_norm_(parameters, 0.5)
    ours = gradients(scale)
    assert GradientClipping(0.5, None, warns=True, where="").clip(ours) == pytest.approx(float(expected), rel=1e-12)
    for one, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-12, atol=0)


def test_nothing_to_clip() -> None:
    assert GradientClipping(0.5, None, warns=True, where="").clip([]) == 0.0


@pytest.mark.parametrize(("bad", "left"), [(math.nan, math.nan), (math.inf, 0.0)])
def test_a_norm_that_is_not_finite_is_said_once(bad: float, left: float, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left is what torch would leave: training goes on, and its loss tells the rest."""
    clipping, silent = (GradientClipping(0.5, None, warns=warns, where="of stage 2 ") for warns in (True, False))
    for one in (clipping, clipping, silent):
        given = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
        one.clip(given)
        assert float(given[1]) == pytest.approx(left, nan_ok=True)
    assert capsys.readouterr().err == f"warning: the norm of the gradients of stage 2 became non-finite ({bad})\n"


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(LaunchError, match="sparse gradients cannot be clipped"):
        GradientClipping(0.5, None, warns=True, where="").clip([torch.eye(3).to_sparse()])


def weight(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def corrected(parameter: nn.Parameter, correction: StepCorrection, steps: list[float], *, aside: bool) -> list[float]:
    """The values after steps that add these numbers; `aside`: whether somebody else keeps the old values."""
    values = []
    for step in steps:
        old = parameter.data.clone()
        if aside:
            correction.around(lambda: parameter.data.add_(step), ["w"], lambda _: old)  # noqa: B023
        else:
            correction.around(lambda: parameter.data.add_(step), ["w"], lambda _: None)  # noqa: B023
        values.append(float(parameter.detach()))
    return values


@pytest.mark.parametrize("aside", [True, False])
@pytest.mark.parametrize(
    ("delay", "expected"), [(1, [1.0, 1 + 2 + 1, 4 + 4 + 2, 10 + 8 + 4]), (2, [1.0, 3.0, 3 + 4 + 3, 10 + 8 + 6])]
)
def test_the_formula_by_hand(delay: int, expected: list[float], aside: bool) -> None:
    parameter = weight(0.0)
    assert corrected(parameter, StepCorrection({"w": parameter}, delay), [1, 2, 4, 8], aside=aside) == expected


@pytest.mark.parametrize(("before", "after", "kept"), [(3, 3, [2, 4, 8]), (3, 2, [4, 8]), (1, 3, [8])])
def test_what_is_saved_serves_stages_with_other_delays(before: int, after: int, kept: list[float]) -> None:
    parameter = weight(0.0)
    first = StepCorrection({"w": parameter}, before)
    corrected(parameter, first, [1, 2, 4, 8], aside=False)
    counts, tensors = first.saved()
    second = StepCorrection({"w": parameter}, after)
    second.restore(counts, lambda names: {name: tensors[name].clone() for name in names}, "here")
    assert [float(step) for step in second.steps["w"]] == kept


@pytest.mark.parametrize("count", [-1, "2", 1.5, True, None])
def test_a_damaged_count_is_refused(count: object) -> None:
    with pytest.raises(LaunchError, match="here: the number of steps of 'w' is damaged"):
        StepCorrection({"w": weight(0.0)}, 1).restore({"w": count}, lambda _: {}, "here")


def test_plain_sgd_is_refused_unless_forced() -> None:
    parameters = {"w": weight(0.0)}
    plain = SGD(parameters.values(), lr=0.1)
    with pytest.raises(LaunchError, match="lowers the largest stable rate of SGD without momentum"):
        make_correction("ef", parameters, plain, 1, asked=True, force=False)
    assert make_correction("ef", parameters, plain, 1, asked=True, force=True) is not None
    assert make_correction("ef", parameters, plain, 0, asked=True, force=False) is None
    assert make_correction("none", parameters, plain, 1, asked=True, force=False) is None
    for optimizer in (SGD(parameters.values(), lr=0.1, momentum=0.9), AdamW(parameters.values())):
        assert make_correction("ef", parameters, optimizer, 2, asked=True, force=False) is not None


def test_what_only_the_plan_names_is_left_out_where_it_harms() -> None:
    parameters = {"w": weight(0.0)}
    assert make_correction("ef", parameters, SGD(parameters.values(), lr=0.1), 1, asked=False, force=False) is None
    assert make_correction("ef", parameters, AdamW(parameters.values()), 1, asked=False, force=False) is not None


@pytest.mark.parametrize("delay", [0, 1, 2, 8])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_rate_by_delay_is_the_published_one_whatever_an_update_covers(delay: int, group: int) -> None:
    scheduler = rate_by_delay(16)
    job = Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), scheduler=scheduler, scheduler_interval="minibatch")
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.3)
    rates = LearningRates(job, optimizer, StageInfo(delay=delay))
    for minibatch in range(0, 24, group):
        expected = 0.3 if delay == 0 else 0.3 / delay ** (1 - min(minibatch / 16, 1))
        assert rates.current == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        rates.after_update(group)


def test_the_recipe_has_the_published_settings() -> None:
    (group,) = nesterov_for_stashing(weight_decay=0.1)([nn.Parameter(torch.ones(2))]).param_groups
    assert (group["lr"], group["betas"], group["momentum_decay"]) == (3e-4, (0.99, 0.999), 0.004)
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == (True, 0.1)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, None])
def test_a_number_of_steps_that_is_none_is_refused(steps: object) -> None:
    with pytest.raises(LaunchError, match="rate_by_delay needs a number of steps of at least 1, not"):
        rate_by_delay(steps)  # type: ignore[arg-type]
