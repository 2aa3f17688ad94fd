"""The self-check passes what trains alike, and names what does not; runs and profiles begin with it."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import checked_models as models
import numpy
import pytest
import torch
from checked_models import ALIKE, job, lose_writes, plain
from launching import render
from repository import ROOT
from torch import Tensor, nn
from toy_workers import stage_contents, write_plan

from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch import Data, Job
from pipeplan_launch.runtime.self_check import check, passes
from pipeplan_launch.runtime.self_check.check import DifferenceFound, NotDeterministic
from pipeplan_launch.runtime.self_check.passes import PipelineModel, Trained
from pipeplan_launch.runtime.self_check.self_check import SelfCheck, even_stages, read_samples, self_check
from pipeplan_launch.tracing import export_fallback
from pipeplan_launch.tracing.forward_state import CarriedState
from pipeplan_launch.tracing.trace import TracedModel, trace_job

torch.set_num_threads(1)


def traced_of(made: Callable[[], Job]) -> tuple[Job, TracedModel]:
    torch.manual_seed(0)
    one = made()
    return one, trace_job(one, 4)


def checked(made: Callable[[], Job]) -> SelfCheck:
    return self_check(*traced_of(made), seed=0, free=None)


@pytest.mark.parametrize("name", ALIKE)
def test_what_trains_alike_passes(name: str) -> None:
    assert checked(ALIKE[name]) == SelfCheck()


class Slow(models.WritesUnread):
    """A moving average with a long memory, which changes its buffer by less than rounding does."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.mean.add_(y.mean(0), alpha=1e-6)
        return self.last(y.relu())


class Stale(passes.WeightVersions):
    """Parameters never change."""

    first: ClassVar[dict[str, Tensor]] = {}

    def acquire(self, minibatch: int, *_: Any) -> Any:
        leaves = super().acquire(minibatch)
        for name, leaf in leaves.items():
            leaf.data = self.first.setdefault(name, leaf.detach().clone())
        return leaves


Plant = Callable[[pytest.MonkeyPatch], None]


def missed_state(patch: pytest.MonkeyPatch) -> None:
    """Have the tracer find no Python state, so that numbers keep the value that they have while it traces."""
    patch.setattr(export_fallback, "carry_python_state", lambda job, minibatch: CarriedState((), ()))


def replaced(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def planted(method: str, change: Callable[[PipelineModel, Any], Any]) -> Plant:
    """Plant a fault into what the pipeline returns."""
    right = getattr(PipelineModel, method)
    return replaced(PipelineModel, method, lambda self, sample: change(self, right(self, sample)))


def refused(made: Callable[[], Job], says: str, plant: Plant = lambda patch: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(DifferenceFound, match=says) as caught:
            checked(made)
    assert "\n" not in str(caught.value)
    assert "--no-self-check" in str(caught.value)


BIAS = "the gradient of the parameter 'bias' of module"


def test_what_differs_is_named() -> None:
    models.CountsInClass.made = 0
    refused(lambda: job(models.CountsInClass()), "the attribute 'made' of the class CountsInClass changes")
    refused(models.reads_weights_in_loss, f"{BIAS} '4' .*leave .data")
    # Models that are traced right or refused, where the tracer or the hooks fail to do so.
    refused(lambda: job(Slow()), r"buffer 'mean' .* loses the write", lambda patch: lose_writes(patch, "mean", ""))
    says = r"the attribute 'step' of the model \(CountsSteps, .*checked_models.py:\d+\) changes .* and keeps its value"
    refused(lambda: job(models.CountsSteps()), says, missed_state)
    says = r"the gradient of the parameter 'weight' of module '2' \(Linear\) differs by"
    unhooked = replaced(passes, "hooked_gradients", lambda gradients, _parameters: gradients)
    refused(lambda: job(models.with_hook()), says, unhooked)
    refused(lambda: job(plain()), r"the loss is .* in minibatch 1", replaced(passes, "WeightVersions", Stale))


def statistics(pipeline: PipelineModel, found: Any) -> Any:
    for program in pipeline.programs:
        if "norm.running_var" in program.buffers_by_name():
            program.buffers_by_name()["norm.running_var"].mul_(1.01)
    return found


def test_faults_of_the_pipeline_are_named() -> None:
    frozen, bias = lambda: job(models.Frozen()), "model.twice.bias"

    def change(of: Callable[[Trained], dict[str, Tensor]], loss: float = 1.0) -> Plant:
        return planted("train", lambda _, found: Trained(found.loss * loss, found.gradients | of(found)))

    def last_lost(_: PipelineModel, found: Trained) -> Trained:
        return Trained(found.loss, {name: one for name, one in found.gradients.items() if "last" not in name})

    refused(frozen, f"{BIAS} 'twice' .* differs by", change(lambda found: {bias: found.gradients[bias] * 1.01}))
    refused(frozen, f"{BIAS} 'last' .* is there in the model alone", planted("train", last_lost))
    refused(frozen, "the loss is 1.* in the model", change(lambda _: {}, 1.001))
    written = "buffer 'running_var' of module 'norm'"
    refused(frozen, f"{written} .* differs by .* in minibatch 0", planted("train", statistics))
    refused(frozen, f"{written} .* by the pipeline, and not by the model in eval", planted("evaluate", statistics))
    added = planted("evaluate", lambda _, found: [one + 0.01 for one in found])
    refused(frozen, "output in evaluation mode differs by 0.01", added)


def rounded(_: PipelineModel, found: Trained) -> Trained:
    """Differences in the last bits, as another order of summation makes; some gradients are nothing else."""
    generator = torch.Generator().manual_seed(0)
    largest = max(float(one.abs().max()) for one in found.gradients.values())
    noisy = {
        name: one + 1e-7 * largest * torch.randn(one.shape, generator=generator)
        for name, one in found.gradients.items()
    }
    return Trained(found.loss * (1 + 1e-6), noisy)


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of `first` goes into a norm, so that its gradient is rounding alone."""
    planted("train", rounded)(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    made = lambda: job(model, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))  # noqa: E731
    assert checked(made) == SelfCheck()


def test_what_trains_alike_and_is_odd_is_a_remark() -> None:
    found = checked(lambda: job(models.CountsCalls()))
    assert found.skipped == ""
    assert "the attribute 'calls' of the model (CountsCalls" in found.remarks[0]
    (remark,) = checked(lambda: job(plain(), optimizer=models.WholeNorm)).remarks
    assert remark.startswith("WholeNorm changes the parameter '0.weight' otherwise as the optimiser of its stage")


def test_a_model_that_differs_from_itself() -> None:
    says = r"two results \(loss\) for one minibatch with the same weights and seeds"
    with pytest.raises(NotDeterministic, match=says):
        checked(lambda: job(models.FollowsTheSystem()))


def test_the_job_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    one, traced = traced_of(lambda: job(models.Frozen(), loss=models.Centers()))
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
    missed_state(monkeypatch)
    one, traced = traced_of(lambda: job(models.CountsSteps()))
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
    (inputs,), target = samples[0].fresh()
    inputs.zero_(), target.zero_()
    assert bool(samples[0].batch.inputs[0].any()), "no two passes share a sample"
    assert bool(samples[0].batch.target.any())


def test_what_cannot_be_checked_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is large, a step that fails by itself, and a model that is slow."""
    one, traced = traced_of(ALIKE["plain"])
    size = sum(parameter.nbytes for parameter in one.model.parameters())
    assert self_check(one, traced, seed=0, free=14 * size) == SelfCheck()
    assert self_check(one, traced, seed=0, free=13 * size).skipped.endswith("that are free")
    found = checked(lambda: job(plain(), optimizer=models.StepFails))
    assert found.skipped.startswith("the optimizer's step failed: ValueError: no step")
    monkeypatch.setattr(check, "LONGEST_PASS_S", -1.0)
    assert checked(ALIKE["plain"]).skipped == "one pass over 4 samples takes 0 s"


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


JOB = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from checked_models import Inside, counts_in_file, job, plain

def good():
    return job(plain())

def counting():
    return job(counts_in_file())

def inside():
    return job(Inside())
"""
DIFFERS = "self-check: the attribute 'CALLS' of the file checked_models changes .* in minibatch 0, so .*"
UNCHECKED = "not self-checked, whether the plan's stages train as the model alone does (--no-self-check)"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(JOB)
    return tmp_path / "jobs.py"


@pytest.mark.skipif(sys.platform != "linux", reason="starts workers as on Linux")
def test_a_run_that_would_differ_starts_unchecked_only(jobs: Path) -> None:
    contents = stage_contents([1, 1], minibatch=4)
    for content, layers in zip(contents, (["0", "1"], ["2", "3", "4", "loss"]), strict=True):
        content |= {"model": {"ref": f"{jobs}:counting", "graph_hash": None}, "layers": layers}
    script = render(write_plan(jobs.parent / "plan", contents))
    refused, unchecked = (
        subprocess.run([str(script), "--epochs", "1", *more], capture_output=True, text=True, timeout=120, check=False)
        for more in ((), ("--no-self-check",))
    )
    assert (refused.returncode, unchecked.returncode) == (2, 0), unchecked.stderr
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(f"error: {DIFFERS}", line), line
    assert f"note: {UNCHECKED}" in unchecked.stderr.splitlines()
    assert len(list((jobs.parent / "plan").glob("runs/*/checkpoints/*"))) == 1


def profiled(jobs: Path, function: str, **options: Any) -> Profile:
    """A profile, through its file."""
    profile_model(f"{jobs}:{function}", ProfilerOptions(repeats=1, warmup=1, **options)).save(
        jobs.parent / "profile.json"
    )
    return Profile.load(jobs.parent / "profile.json")


def test_a_profile_that_would_differ_is_made_unchecked_only(jobs: Path) -> None:
    with pytest.raises(InputError, match=DIFFERS):
        profiled(jobs, "counting")
    profile = profiled(jobs, "counting", self_check=False)
    assert profile.unchecked == "--no-self-check"
    assert any("not self-checked" in note for note in profile.provenance.notes)
    profile = profiled(jobs, "good")
    assert (profile.unchecked, profile.taken_whole) == ("", ())
    assert "unchecked" not in profile.to_json()["model"]


def test_a_module_that_would_differ_is_taken_whole(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_writes(monkeypatch, "body.mean", "body")
    profile = profiled(jobs, "inside")
    assert profile.taken_whole == ("body",)
    assert profile.provenance.traced == "torch.export; taken whole: body"
    assert any("taken whole, because their stages" in note for note in profile.provenance.notes)
