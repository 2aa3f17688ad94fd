"""The self-check passes what trains alike, and names what does not; it leaves the job as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, ClassVar

import checked_models
import numpy
import pytest
import torch
from checked_models import (
    ALIKE,
    CountsCalls,
    CountsInClass,
    CountsInFile,
    CountsSteps,
    FollowsTheSystem,
    Frozen,
    HasHelper,
    Inside,
    StepFails,
    WholeNorm,
    WritesUnread,
    job,
    lose_writes,
    plain,
    reads_weights_in_loss,
    with_backward_hook,
    with_hook,
)
from torch import Tensor, nn

from pipeplan_launch import Data, Job
from pipeplan_launch.runtime.self_check import check, passes
from pipeplan_launch.runtime.self_check.check import DifferenceFound, NotDeterministic
from pipeplan_launch.runtime.self_check.passes import PipelineModel, Sample
from pipeplan_launch.runtime.self_check.self_check import SelfCheck, even_stages, read_samples, self_check
from pipeplan_launch.tracing import export_fallback, trace
from pipeplan_launch.tracing.forward_state import CarriedState
from pipeplan_launch.tracing.trace import TracedModel, trace_job

torch.set_num_threads(1)


def traced_of(made: Callable[[], Job]) -> tuple[Job, TracedModel]:
    torch.manual_seed(0)
    one = made()
    return one, trace_job(one, 4)


def checked(made: Callable[[], Job]) -> SelfCheck:
    one, traced = traced_of(made)
    return self_check(one, traced, seed=0, free=None)


@pytest.mark.parametrize("name", ALIKE)
def test_what_trains_alike_passes(name: str) -> None:
    assert checked(ALIKE[name]) == SelfCheck()


DIFFERENT: dict[str, tuple[Callable[[], Job], str]] = {
    "class attribute": (lambda: job(CountsInClass()), "the attribute 'made' of the class CountsInClass changes"),
    "global variable": (lambda: job(CountsInFile()), "the attribute 'CALLS' of the file checked_models changes"),
    "weights in the loss": (reads_weights_in_loss, "the gradient of the parameter 'bias' of module '4' .*leave .data"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_named(name: str) -> None:
    made, says = DIFFERENT[name]
    checked_models.CALLS[0] = CountsInClass.made = 0
    with pytest.raises(DifferenceFound, match=says) as caught:
        checked(made)
    assert "\n" not in str(caught.value)
    assert "--no-self-check" in str(caught.value)


def missed_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tracer find no Python state, so that numbers keep the value that they have while it traces."""
    monkeypatch.setattr(export_fallback, "carry_python_state", lambda job, minibatch: CarriedState((), ()))


def missed_module_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "refuse_module_hooks", lambda model: None)


def skipped_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "hooked_gradients", lambda gradients, parameters: gradients)


def lost_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_writes(monkeypatch, "mean", "")


MISSED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Job], str]] = {
    "lost write": (
        lost_writes,
        lambda: job(WritesUnread()),
        r"'mean' of the model \(WritesUnread, .*checked_models.py:\d+\) is written .* alone: .* minibatch 0, .*: move",
    ),
    "step counter": (
        missed_state,
        lambda: job(CountsSteps()),
        r"the attribute 'step' of the model \(CountsSteps, .*checked_models.py:\d+\) changes .* and keeps its value",
    ),
    "helper object": (
        missed_state,
        lambda: job(HasHelper()),
        r"the attribute 'meter' of the model \(HasHelper, .*\) changes",
    ),
    "hook on a parameter": (
        skipped_hooks,
        lambda: job(with_hook()),
        r"the gradient of the parameter 'weight' of module '2' \(Linear\) differs by",
    ),
    "hook of a module": (
        missed_module_hooks,
        lambda: job(with_backward_hook()),
        "the gradient of the parameter 'bias' of module '2'",
    ),
}


@pytest.mark.parametrize("name", MISSED)
def test_what_the_tracer_should_miss_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Models that are traced right or refused, where the tracer or the hooks fail to do so."""
    plant, made, says = MISSED[name]
    plant(monkeypatch)
    with pytest.raises(DifferenceFound, match=says) as caught:
        checked(made)
    assert "\n" not in str(caught.value)
    assert "--no-self-check" in str(caught.value)


def planted(monkeypatch: pytest.MonkeyPatch, method: str, change: Callable[[PipelineModel, Any], Any]) -> None:
    """Plant a fault into what the pipeline returns."""
    right = getattr(PipelineModel, method)
    monkeypatch.setattr(PipelineModel, method, lambda self, sample: change(self, right(self, sample)))


def scaled(pipeline: PipelineModel, found: passes.Trained) -> passes.Trained:
    return passes.Trained(
        found.loss, {**found.gradients, "model.twice.bias": found.gradients["model.twice.bias"] * 1.01}
    )


def lost(pipeline: PipelineModel, found: passes.Trained) -> passes.Trained:
    return passes.Trained(found.loss, {name: one for name, one in found.gradients.items() if "last" not in name})


def statistics(pipeline: PipelineModel, found: Any) -> Any:
    for program in pipeline.programs:
        for name, buffer in program.buffers_by_name().items():
            if name == "norm.running_var":
                buffer.mul_(1.01)
    return found


@pytest.mark.parametrize(
    ("method", "change", "says"),
    [
        ("train", scaled, "gradient of the parameter 'bias' of module 'twice' .* differs by"),
        ("train", lost, "gradient of the parameter 'bias' of module 'last' .* is there in the model alone"),
        ("train", lambda _, found: passes.Trained(found.loss * 1.001, found.gradients), "the loss is 1.* in the model"),
        ("train", statistics, "buffer 'running_var' of module 'norm' .* differs by .* in minibatch 0"),
        ("evaluate", statistics, "buffer 'running_var' .* by the pipeline, and not by the model in evaluation before"),
        ("evaluate", lambda _, found: [one + 0.01 for one in found], "output in evaluation mode differs by 0.01"),
    ],
    ids=["gradient", "no gradient", "loss", "buffer", "evaluation writes", "output"],
)
def test_planted_faults_are_named(monkeypatch: pytest.MonkeyPatch, method: str, change: Any, says: str) -> None:
    planted(monkeypatch, method, change)
    with pytest.raises(DifferenceFound, match=says):
        checked(lambda: job(Frozen()))


def test_stale_parameters_show_in_the_second_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(passes.WeightVersions):
        first: ClassVar[dict[str, Tensor]] = {}

        def acquire(self, minibatch: int, *_: Any) -> Any:
            leaves = super().acquire(minibatch)
            for name, leaf in leaves.items():
                leaf.data = self.first.setdefault(name, leaf.detach().clone())
            return leaves

    monkeypatch.setattr(passes, "WeightVersions", Stale)
    with pytest.raises(DifferenceFound, match=r"the loss is .* in minibatch 1"):
        checked(lambda: job(plain()))


def rounded(pipeline: PipelineModel, found: passes.Trained) -> passes.Trained:
    """Differences in the last bits, as another order of summation makes; some gradients are nothing else."""
    generator = torch.Generator().manual_seed(0)
    largest = max(float(one.abs().max()) for one in found.gradients.values())
    noisy = {
        name: one + 1e-7 * largest * torch.randn(one.shape, generator=generator)
        for name, one in found.gradients.items()
    }
    return passes.Trained(found.loss * (1 + 1e-6), noisy)


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of `first` goes into a norm, so that its gradient is rounding alone."""
    planted(monkeypatch, "train", rounded)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    made = lambda: job(model, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))  # noqa: E731
    assert checked(made) == SelfCheck()


def test_a_write_of_a_last_bit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moving average with a long memory changes its buffer by less than rounding does."""

    class Slow(WritesUnread):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            with torch.no_grad():
                self.mean.add_(y.mean(0), alpha=1e-6)
            return self.last(y.relu())

    lost_writes(monkeypatch)
    with pytest.raises(DifferenceFound, match=r"buffer 'mean' .* loses the write"):
        checked(lambda: job(Slow()))


def test_what_nothing_reads_is_a_remark() -> None:
    found = checked(lambda: job(CountsCalls()))
    assert found.skipped == ""
    assert "the attribute 'calls' of the model (CountsCalls" in found.remarks[0]


def test_an_optimiser_over_the_whole_model_is_a_remark() -> None:
    (remark,) = checked(lambda: job(plain(), optimizer=WholeNorm)).remarks
    assert remark.startswith("WholeNorm changes the parameter '0.weight' otherwise as the optimiser of its stage")


def test_a_model_that_differs_from_itself() -> None:
    made = lambda: job(FollowsTheSystem())  # noqa: E731
    with pytest.raises(
        NotDeterministic, match=r"two results \(loss\) for one minibatch with the same weights and seeds"
    ):
        checked(made)


def test_a_module_is_named_that_can_be_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_writes(monkeypatch, "body.mean", "body")
    one, traced = traced_of(lambda: job(Inside()))
    with pytest.raises(DifferenceFound) as caught:
        self_check(one, traced, seed=0, free=None)
    assert caught.value.difference.path == "body"
    whole = trace_job(one, 4, whole=["body"])
    assert whole.graph_hash != traced.graph_hash
    assert self_check(one, whole, seed=0, free=None) == SelfCheck()


def test_the_job_is_left_as_it_was() -> None:
    one, traced = traced_of(lambda: job(Frozen(), loss=checked_models.Centers()))
    assert isinstance(one.loss, nn.Module)
    one.model.note = {"seen": [1, torch.ones(2)]}
    one.model.last.weight.grad = torch.ones(3, 4)
    before = copy.deepcopy((one.model.state_dict(), one.loss.state_dict(), one.model.note))
    objects = [*one.model.parameters(), *one.model.buffers()]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    generators = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    self_check(one, traced, seed=0, free=None)
    assert generators == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    for was, now in zip(before[:2], (one.model.state_dict(), one.loss.state_dict()), strict=True):
        assert all(torch.equal(was[name], now[name]) for name in was)
    assert all(was is now for was, now in zip(objects, [*one.model.parameters(), *one.model.buffers()], strict=True))
    assert one.model.note["seen"][0] == 1
    assert torch.equal(one.model.last.weight.grad, torch.ones(3, 4))


def test_a_counter_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    missed_state(monkeypatch)
    one, traced = traced_of(lambda: job(CountsSteps()))
    one.model.step = 7
    with pytest.raises(DifferenceFound):
        self_check(one, traced, seed=0, free=None)
    assert one.model.step == 7


class Positioned(torch.utils.data.Dataset[Any]):
    """Draws from a generator of its own, and counts what it gives."""

    def __init__(self) -> None:
        self.generator, self.given = torch.Generator().manual_seed(3), 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return torch.rand(4, generator=self.generator), index % 3


def test_reading_leaves_the_data_where_it_was() -> None:
    data = Positioned()
    one = job(plain(), data=lambda: Data(data))
    samples = read_samples(one, 4, 0)
    assert [sample.batch.target.tolist() for sample in samples] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert data.given == 0
    assert torch.equal(data.generator.get_state(), torch.Generator().manual_seed(3).get_state())


def test_a_large_model_is_left_out() -> None:
    one, traced = traced_of(ALIKE["plain"])
    size = sum(parameter.nbytes for parameter in one.model.parameters())
    assert self_check(one, traced, seed=0, free=14 * size) == SelfCheck()
    found = self_check(one, traced, seed=0, free=13 * size)
    assert found.skipped.endswith("that are free")


def test_a_slow_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LONGEST_PASS_S", -1.0)
    assert checked(ALIKE["plain"]).skipped == "one pass over 4 samples takes 0 s"


def test_what_fails_by_itself_is_left_to_the_run() -> None:
    found = checked(lambda: job(plain(), optimizer=StepFails))
    assert found.skipped.startswith("the optimizer's step failed: ValueError: no step")


def test_a_small_minibatch_that_fails_gives_way_to_the_traced_one() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert len(output) > 4
        return output.square().mean()

    torch.manual_seed(0)
    one = job(plain(), loss=loss)
    assert self_check(one, trace_job(one, 6), seed=0, free=None) == SelfCheck()


def test_stages_keep_together_what_must() -> None:
    _, traced = traced_of(lambda: job(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))))
    assert even_stages(traced) == [["0"], ["1", "2"], ["loss"]] or len(even_stages(traced)) == 3
    names = [layer.name for layer in traced.layers]
    held = TracedModel(**{**vars(traced), "together": (tuple(names),)})
    assert even_stages(held) == [names]


def test_samples_are_not_shared_by_two_passes() -> None:
    sample = Sample(0, job(plain()).example_batch(4), 4)
    (inputs,), target = sample.fresh()
    inputs.zero_()
    target.zero_()
    assert bool(sample.batch.inputs[0].any())
    assert bool(sample.batch.target.any())
