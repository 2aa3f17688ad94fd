"""Learning rates, clipping, the correction of steps, presets, and optimisers in parts, without workers."""

from __future__ import annotations

import itertools
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import run
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, lr_scheduler

from pipeplan_launch import Job, StageInfo, nesterov_for_stashing, rate_by_delay
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.run_options import GradientAveraging, check_averaging_options, transport_of
from pipeplan_launch.runtime import optimizer_shards, stage_optimizer
from pipeplan_launch.runtime.optimizer_shards import ELEMENTWISE, OptimizerShards
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


def job(scheduler: Any = None, interval: str = "minibatch", **more: Any) -> Job:
    timed = (
        {} if scheduler is None else {"scheduler": SCHEDULERS.get(scheduler, scheduler), "scheduler_interval": interval}
    )
    return Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), **timed, **more)


def two_groups(optimizer: Any = MOMENTUM) -> Any:
    own, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    return optimizer([{"params": [own]}, {"params": [other], "lr": 0.05}], lr=0.1)


def made(job: Job, optimizer: Any = MOMENTUM) -> tuple[Any, LearningRates]:
    built = two_groups(optimizer)
    return built, LearningRates(job, built, StageInfo())


def settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_all_stages_have_the_same_rate_for_the_same_minibatch(name: str) -> None:
    """Whatever an update covers, and where a run goes on; as torch's own scheduler has it after as many steps."""
    for optimizer in (MOMENTUM, AdamW):
        alone = two_groups(optimizer)
        reference, expected = SCHEDULERS[name](alone), []
        for _ in range(31):
            expected.append(settings(alone))
            alone.step()
            reference.step()
        *stages, (part, rates_of_part) = (made(job(name), optimizer) for _ in range(4))
        before = settings(two_groups(optimizer))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for size, (ours, rates) in enumerate(stages, 1):
                for minibatch in range(0, 30, size):
                    assert settings(ours) == expected[minibatch]
                    ours.step()
                    rates.after_update(size)
                    rates.after_epoch(0.5)
                assert settings(ours) == expected[30]
            rates_of_part.catch_up(20, [None, None])
            for _ in range(10):
                part.step()
                rates_of_part.after_update(1)
        assert settings(part) == expected[30]
        pairs = zip(settings(part), before, strict=True)
        changed = {key for one, old in pairs for key in one if one[key] != old.get(key)}
        assert changed <= rates_of_part.keys, "a checkpoint brings nothing that the scheduler decides"


def test_plateau_follows_the_test_loss() -> None:
    """Epochs that were not evaluated do not count; neither does a loss that is not a number."""
    plateau = job(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1), "epoch")
    losses = [1.0, 0.9, None, 0.95, float("nan"), 0.97, 0.99, 0.99]
    (ours, rates), (_, again), seen = made(plateau), made(plateau), []
    ours.step()
    rates.after_update(5)
    for loss in losses:
        rates.after_epoch(loss)
        seen.append(rates.current)
    assert seen == [0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025]
    again.catch_up(99, losses[:4])
    for loss in losses[4:]:
        again.after_epoch(loss)
    assert again.current == rates.current
    assert rates.needs_test_loss


def test_errors_of_schedulers() -> None:
    for scheduler, says in (
        (lr_scheduler.ReduceLROnPlateau, "follows the test loss, once an epoch"),
        (lambda optimizer: optimizer, r"must return a scheduler of torch\.optim\.lr_scheduler, not SGD"),
        (lambda optimizer: 1 / 0, r"the job's scheduler failed: ZeroDivisionError.*test_stage_optimizer\.py"),
    ):
        with pytest.raises(LaunchError, match=says):
            made(job(scheduler))
    _, rates = made(job("one-cycle"))
    with pytest.raises(LaunchError, match="the job's scheduler failed: ValueError: Tried to step 41 times"):
        rates.catch_up(41, [])
    for steps in (0, -1, 2.5, True, None):
        with pytest.raises(LaunchError, match="rate_by_delay needs a number of steps of at least 1, not"):
            rate_by_delay(steps)  # type: ignore[arg-type]


def test_the_optimiser_gets_trained_parameters_once() -> None:
    moving, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    given = {"moving": moving, "frozen": frozen, "tied": moving, "buffer": torch.ones(2)}
    assert stage_optimizer._trainable(given) == {"moving": moving}


def test_what_the_scheduler_decides_and_not_a_checkpoint() -> None:
    assert made(job())[1].keys == frozenset()
    assert made(job(scale_lr="linear"))[1].keys == {"lr"}
    assert made(job(optimizer=lambda parameters, stage: SGD(parameters, lr=1.0)))[1].keys == {"lr"}
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1), fused=True)
    rates = LearningRates(job("lambda"), optimizer, StageInfo())
    rates.catch_up(3, [])
    assert rates.current == pytest.approx(0.025), "also a rate that is a tensor"
    assert "lr" in rates.keys


def clipping(warns: bool = True, where: str = "") -> GradientClipping:
    return GradientClipping(0.5, None, warns=warns, where=where)


def test_clipping_equals_torchs_own() -> None:
    """Also where the norm is below the limit: then nothing changes."""
    for scale in (1e-3, 0.3, 1e3):
        generator = torch.Generator().manual_seed(1)
        given = [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), ())]
        parameters = [nn.Parameter(torch.zeros_like(one)) for one in given]
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        expected = clip_grad_norm_(parameters, 0.5)
        assert clipping().clip(given) == pytest.approx(float(expected), rel=1e-12)
        for one, parameter in zip(given, parameters, strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-12, atol=0)
    assert clipping().clip([]) == 0.0
    with pytest.raises(LaunchError, match="sparse gradients cannot be clipped"):
        clipping().clip([torch.eye(3).to_sparse()])


def test_a_norm_that_is_not_finite_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left is what torch would leave: training goes on, and its loss tells the rest."""
    for bad, left in ((math.nan, math.nan), (math.inf, 0.0)):
        loud, silent = (clipping(warns, "of stage 2 ") for warns in (True, False))
        for one in (loud, loud, silent):
            given = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
            one.clip(given)
            assert float(given[1]) == pytest.approx(left, nan_ok=True)
        said = f"warning: the norm of the gradients of stage 2 became non-finite ({bad})\n"
        assert capsys.readouterr().err == said


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, dtype=torch.float64))


def test_saved_steps_of_the_correction_serve_stages_with_other_delays() -> None:
    for before, after, kept in ((3, 3, [2, 4, 8]), (3, 2, [4, 8]), (1, 3, [8])):
        parameter = weight()
        first, second = (StepCorrection({"w": parameter}, delay) for delay in (before, after))
        for step in (1, 2, 4, 8):
            first.around(lambda: parameter.data.add_(step), ["w"], lambda _: None)  # noqa: B023
        counts, tensors = first.saved()
        second.restore(counts, lambda names: {name: tensors[name].clone() for name in names}, "here")  # noqa: B023
        assert [float(step) for step in second.steps["w"]] == kept
    for count in (-1, "2", 1.5, True, None):
        with pytest.raises(LaunchError, match="here: the number of steps of 'w' is damaged"):
            StepCorrection({"w": weight()}, 1).restore({"w": count}, lambda _: {}, "here")


def test_plain_sgd_is_not_corrected_unless_forced() -> None:
    parameters = {"w": weight()}
    plain, others = (
        SGD(parameters.values(), lr=0.1),
        (MOMENTUM(parameters.values(), lr=0.1), AdamW(parameters.values())),
    )
    with pytest.raises(LaunchError, match="lowers the largest stable rate of SGD without momentum"):
        make_correction("ef", parameters, plain, 1, asked=True, force=False)
    for kind, optimizer, delay, asked, force, makes in (
        ("ef", plain, 1, True, True, True),
        ("ef", plain, 0, True, False, False),
        ("none", plain, 1, True, False, False),
        ("ef", plain, 1, False, False, False),
        *(("ef", other, 2, asked, False, True) for other in others for asked in (True, False)),
    ):
        found = make_correction(kind, parameters, optimizer, delay, asked=asked, force=force)
        assert (found is not None) == makes


def test_presets_have_the_published_settings() -> None:
    """Whatever an update covers, the rate by delay follows the minibatches."""
    (group,) = nesterov_for_stashing(weight_decay=0.1)([nn.Parameter(torch.ones(2))]).param_groups
    assert (group["lr"], group["betas"], group["momentum_decay"]) == (3e-4, (0.99, 0.999), 0.004)
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == (True, 0.1)
    for delay, size in itertools.product((0, 1, 2, 8), (1, 2, 4)):
        optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.3)
        rates = LearningRates(job(rate_by_delay(16)), optimizer, StageInfo(delay=delay))
        for minibatch in range(0, 24, size):
            expected = 0.3 if delay == 0 else 0.3 / delay ** (1 - min(minibatch / 16, 1))
            assert rates.current == pytest.approx(expected, rel=1e-12)
            optimizer.step()
            rates.after_update(size)


# Optimisers in parts.


class OwnAdam(optim.Adam):
    """An optimiser that is not torch's own."""


def stand_alone(patch: pytest.MonkeyPatch, index: int, count: int) -> None:
    """Make this process the replica of a number among so many, without a process group."""
    patch.setattr(dist, "get_rank", lambda _group: index)
    patch.setattr(dist, "get_world_size", lambda _group: count)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"matrix": (3, 5), "bias": (2,), "scale": (), "none": (0, 4)}
    made = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    return {**made, "waves": nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))}


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_steps_of_all_parts_are_the_step_of_the_whole(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
        stand_alone(monkeypatch, index, 4)
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


def hooked(parameters: Any) -> optim.Optimizer:
    made = optim.Adam(parameters)
    made.register_step_post_hook(lambda *_: None)
    return made


def test_what_cannot_be_in_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_alone(monkeypatch, 0, 2)
    others = (OwnAdam, optim.Adafactor, optim.LBFGS)
    for make, says in (
        (hooked, "which its step hooks would meet in place of whole ones"),
        *((kind, f"optimiser is {kind.__name__}, and it takes torch's SGD, Adam") for kind in others),
    ):
        own = parameters()
        with pytest.raises(LaunchError, match=says):
            OptimizerShards(own, make(own.values()), object())  # type: ignore[arg-type]
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
    found = []
    for size in (0, 1 << 30):
        (tmp_path / str(size)).mkdir()
        found += run(3, _trained, tmp_path / str(size), size)
    for name, expected in found[0].items():
        assert all(torch.equal(one[name], expected) for one in found), name
