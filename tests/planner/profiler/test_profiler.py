"""Profiles of real models, and what is said of models that cannot be profiled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pipeplan.cli.commands.list_ import command as list_command
from pipeplan.cli.profile import command as profile_command
from pipeplan.cli.profile.table import measured_profile
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch.job.bundled_models import BUNDLED

JOBS = """
import torch
from torch import nn
from pipeplan_launch import Data, Job

def job(model=None, width=4, **more):
    samples = [(torch.ones(width), 0)] * 9
    return Job(model or nn.Sequential(nn.Linear(4, 4)), data=lambda: Data(samples), **more)

class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.last(torch.log(self.first(x) - 100))

class Branches(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Log()
    def forward(self, x):
        return self.inner(x)

class Fixed(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(8, 4)

def nan(): return job(Log())
def nan_inside():
    model = nn.Module()
    model.deep = Deep()
    model.forward = lambda x: model.deep(x)
    return job(model)
def fixed(): return job(Fixed(4, 4))
def bad_optimizer(): return job(optimizer=torch.optim.LBFGS)
def branches(): return job(Branches(4, 4))
def wrong_shape(): return job(width=5)
def loss_of_many(): return job(loss=lambda output, target: output)
def loss_nan(): return job(loss=lambda output, target: output.sum() * float("inf") * 0)
def loss_fails(): return job(loss=lambda output, target: output[99].sum())
def frozen(): return job(nn.Linear(4, 4).requires_grad_(False), loss=lambda output, target: output.sum())
def nothing(): return None
def loss_of_torch(): return job(loss=torch.nn.functional.mse_loss)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.b.weight = self.a.weight
    def forward(self, ids):
        return self.b(self.a(ids))

def of_inputs(model, make=torch.randn, **more):
    return Job(model, inputs=lambda n: make(n, 4), **more)

def tied():
    adam = lambda parameters: torch.optim.Adam(parameters)
    return of_inputs(Tied(), lambda n, _: torch.randint(0, 5, (n, 3)), optimizer=adam)
def normalised(): return of_inputs(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
def talks():
    print("hello")
    return of_inputs(nn.Linear(4, 2))
def classifies(dtype=None):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    samples = [(torch.randn(16), index % 4) for index in range(64)]
    return Job(model, loss=nn.functional.cross_entropy, data=lambda: Data(samples), autocast=dtype)
def in_half(): return classifies(torch.bfloat16)

class Chooses(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum() > 0 else 3)

class ByKeyword(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 8), part, nn.Linear(8, 3)
    def forward(self, *, x, shift=None):
        return self.last(self.part(self.first(x) + shift))

def by_keyword(part=None):
    samples = [{"x": torch.randn(4), "shift": torch.randn(8)} for _ in range(12)]
    loss = lambda output, batch: output.square().mean() + 0 * batch["x"].sum()
    return Job(ByKeyword(part or nn.Linear(8, 8)), loss=loss, data=lambda: Data(samples), minibatch=5)
def chooses(): return by_keyword(Chooses(8, 8))

class Damaged(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 7:
            raise OSError("sample 7 is damaged")
        return torch.zeros(4), torch.zeros(4)

def damaged(): return Job(nn.Linear(4, 4), loss=nn.functional.mse_loss, data=lambda: Data(Damaged()), minibatch=4)
"""


QUICK = ProfilerOptions(batches=(8,), repeats=2, warmup=1)


Step = tuple[int, int, str]


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A file of jobs."""
    (tmp_path / "jobs.py").write_text(JOBS)
    return tmp_path / "jobs.py"


@pytest.fixture(scope="module")
def mnist() -> tuple[Profile, list[Step]]:
    """The profile of a model, and what was said while it was made."""
    steps: list[Step] = []
    return profile_model("mnist", QUICK, lambda done, total, what: steps.append((done, total, what))), steps


@pytest.fixture(scope="module")
def resnet() -> Profile:
    """Of a model with skips and BatchNorm, at three minibatch sizes."""
    return profile_model("resnet-tiny", ProfilerOptions(batches=(12,), repeats=2, warmup=1, halvings=3))


def test_profile_of_mnist(mnist: tuple[Profile, list[Step]]) -> None:
    profile, steps = mnist
    layers = {layer.name: layer for layer in profile.layers}
    assert list(layers)[:3] == ["conv1", "relu", "conv2"]
    assert (layers["fc1"].parameter_bytes, layers["fc1"].op) == ((1568 + 1) * 200 * 4, "Linear")
    assert layers["relu"].saved_bytes == 8 * 16 * 14 * 14 * 4
    assert layers["conv1"].saved_bytes == 8 * 28 * 28 * 4, "the data of a minibatch, for as long as it is in flight"
    assert all(layer.forward_s >= 0 and layer.backward_s >= 0 for layer in profile.layers)
    assert sum(layer.backward_s for layer in profile.layers) > 0
    tensors = {tensor.name: tensor for tensor in profile.tensors}
    assert (tensors["out"].consumers, tensors["out"].bytes, tensors["out"].gradient_bytes) == (("loss",), 320, 320)
    assert (profile.model_ref, profile.model_name, profile.minibatch) == ("mnist", "mnist", 8)
    assert (profile.optimizer_name, profile.optimizer_state_ratio) == ("Adam", 2.0)
    assert profile.provenance.repeats == 2
    assert profile.provenance.kind == "measured"
    stepped = {name for name, layer in layers.items() if layer.update_s > 0}
    assert {"fc1", "fc2"} <= stepped <= {"conv1", "conv2", "fc1", "fc2", "out"}
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    assert 4 * parameters < profile.peak_bytes < 7 * parameters
    assert layers["conv2"].workspace_bytes > 0
    assert profile.provenance.torch == torch.__version__
    assert profile.whole_forward_s
    assert profile.whole_backward_s
    assert profile.whole_split_s
    assert (1, 2, "measuring") in steps
    assert steps[-1] == (1, 1, "done")


def test_buffers_and_skips_are_charged_once(resnet: Profile) -> None:
    assert (resnet.optimizer_name, resnet.optimizer_state_ratio) == ("SGD", 1.0)
    layers = {layer.name: layer for layer in resnet.layers}
    assert layers["bn"].buffer_bytes == 2 * 16 * 4 + 8
    relu = next(tensor for tensor in resnet.tensors if tensor.name == "relu")
    assert relu.consumers == ("stages.0.0.conv1", "stages.0.0.add")


def test_ties_are_charged_once(jobs: Path) -> None:
    profile = profile_model(f"{jobs}:tied", QUICK)
    assert sum(layer.parameter_bytes for layer in profile.layers) == (5 * 4 + 5) * 4
    assert not profile.together
    assert profile.tied == (TiedWeights(("a.weight = b.weight",), ("a", "b"), 5 * 4 * 4),)
    assert (profile.optimizer_name, profile.optimizer_state_ratio) == ("Adam", 2.0)
    assert "sum of the outputs" in profile.provenance.how
    assert profile.lacks == ("loss", "data")
    said = "the job has no loss and no data, so that it can be planned, but launch.sh cannot train it: return Job("
    assert [note for note in profile.provenance.notes if note.startswith(said)]


def test_halves_of_the_minibatch_are_measured_as_well(
    tmp_path: Path, resnet: Profile, mnist: tuple[Profile, list[Step]]
) -> None:
    profile, (alone, _) = resnet, mnist
    assert [size.minibatch for size in profile.sizes] == [6, 3]
    assert profile.sizes[0].tensors[0].bytes * 2 == profile.tensors[0].bytes
    assert all(sum(layer.forward_s for layer in size.layers) > 0 for size in profile.sizes)
    assert profile.batch_norm
    assert any(note.startswith("BatchNorm normalises over one microbatch") for note in profile.provenance.notes)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert (alone.sizes, alone.batch_norm) == ((), False)


def test_a_size_that_the_model_cannot_run_is_left_out_and_named(jobs: Path) -> None:
    """BatchNorm over single values fails in training."""
    profile = profile_model(f"{jobs}:normalised", ProfilerOptions(batches=(4,), repeats=2, warmup=1, halvings=3))
    assert [size.minibatch for size in profile.sizes] == [2]
    (note,) = [note for note in profile.provenance.notes if "was not measured" in note]
    assert note.startswith("microbatch 1, and anything smaller, was not measured: ")


def test_a_model_of_one_size_is_measured_at_that_size(jobs: Path) -> None:
    made = profile_model(f"{jobs}:fixed", ProfilerOptions(batches=(8,), repeats=1, halvings=3))
    assert made.sizes == ()
    assert not made.dynamic_batch


ERRORS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("mnits", {}, "did you mean 'mnist'"),
    ("FILE:nan", {}, "layer 'log' of .* produces NaN"),
    ("FILE:branches", {}, r"depends on the data \(.*jobs.py:20: return y if y.sum\(\) > 0 else -y\)"),
    ("FILE:wrong_shape", {}, r"fails on its example inputs \(8×5\)"),
    ("FILE:loss_of_many", {}, r"must be a single number, not \(8, 4\)"),
    ("FILE:loss_nan", {}, "the loss of .* is nan"),
    (
        "FILE:loss_fails",
        {},
        r"on a microbatch of its data: the job's loss \(lambda of .*jobs.py:45\) failed: IndexError: .*jobs.py:45",
    ),
    # No line of pipeplan's own is quoted where no line of the job's is to blame.
    ("FILE:loss_of_torch", {}, r"data: the job's loss \(mse_loss\) failed: RuntimeError: .* dimension 1$"),
    ("FILE:frozen", {}, "does not depend on any parameter"),
    ("FILE:nothing", {}, "returned NoneType"),
    ("mnist", {"batches": (0,)}, "microbatch size must be at least 1, not 0"),
    ("mnist", {"repeats": -1}, "repeats must be at least 1, not -1"),
    ("mnist", {"halvings": -1}, "halvings must be at least 0, not -1"),
    ("mnist", {"batches": (8, 16, 8)}, "a microbatch size is given twice: 8, 16, 8"),
    ("FILE:fixed", {"batches": (8, 16)}, "can only be traced for one microbatch size at a time"),
    ("FILE:nan_inside", {}, r"layer 'deep.inner.log' \(in the module 'deep.inner'\) of .* produces NaN"),
    ("FILE:bad_optimizer", {}, "a job's optimizer cannot be LBFGS, whose step calls a closure"),
    ("mnist", {"threads": 0}, "threads must be at least 1, not 0"),
    ("mnist", {"device": "tpu"}, "there is no device 'tpu'"),
)
"""A model, options, and what is said of them."""


def test_errors(jobs: Path) -> None:
    for ref, options, says in ERRORS:
        chosen = ProfilerOptions(**{"batches": (8,), "repeats": 1, **options})
        with pytest.raises(InputError, match=says) as caught:
            profile_model(ref.replace("FILE", str(jobs)), chosen)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda() -> None:
    with pytest.raises(InputError, match="no CUDA device"):
        profile_model("mnist", ProfilerOptions(device="cuda"))


def test_the_command_prints_a_table_or_json_alone(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(jobs.parent)
    result = CliRunner().invoke(profile_command, [f"{jobs}:talks", "--repeats", "1"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "Sum / whole" in result.stdout
    assert Profile.load("profile.json").minibatch == 32
    arguments = [f"{jobs}:talks", "--json", "--microbatch", "4", "--repeats", "1", "-o", "out.json"]
    result = CliRunner().invoke(profile_command, arguments, catch_exceptions=False)
    printed, written = json.loads(result.stdout), json.loads(Path("out.json").read_text())
    assert (printed["model"].pop("ref"), written["model"].pop("ref")) == (f"{jobs}:talks", "jobs.py:talks")
    assert printed == written, "the file alone has the job relative to its folder"
    assert written["minibatch"] == 4


def test_the_profile_says_how_the_model_was_traced(jobs: Path) -> None:
    """Models that are called by keyword are profiled as others are."""
    for name, traced in (("by_keyword", "torch.export"), ("chooses", "torch.export; taken whole: part")):
        profile = profile_model(f"{jobs}:{name}", ProfilerOptions(repeats=2))
        assert profile.provenance.traced == traced
        assert [layer.name for layer in profile.layers] == ["first", "add", "part", "last", "loss"]
        assert profile.layers[2].parameter_bytes == 4 * (8 * 8 + 8)
        profile.save(jobs.parent / "profile.json")
        assert Profile.load(jobs.parent / "profile.json").provenance.traced == traced
        lines = [line for line in measured_profile(profile) if isinstance(line, str)]
        assert [line for line in lines if line.startswith("Traced")] == [f"Traced by {traced}"] * (name == "chooses")


def test_a_sample_that_fails_is_remarked_and_the_model_measured(jobs: Path) -> None:
    found = profile_model(f"{jobs}:damaged", ProfilerOptions(repeats=1, warmup=1))
    assert found.read_s == 0
    (said,) = [note for note in found.provenance.notes if "reading samples was not measured" in note]
    assert "sample 7 is damaged" in said


def test_nothing_is_written_when_it_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(profile_command, ["mnits", "-o", str(tmp_path / "out.json")])
    assert isinstance(result.exception, InputError)
    result = CliRunner().invoke(profile_command, ["mnist", "-o", str(tmp_path)])
    assert "is a folder" in str(result.exception)
    assert os.listdir(tmp_path) == []


def test_models_command() -> None:
    result = CliRunner().invoke(list_command, ["models"], catch_exceptions=False)
    assert all(name in result.stdout for name in BUNDLED)
    assert json.loads(CliRunner().invoke(list_command, ["models", "--json"]).stdout) == BUNDLED


def test_activations_take_half_the_bytes(jobs: Path) -> None:
    plain, half = (profile_model(f"{jobs}:{name}", QUICK) for name in ("classifies", "in_half"))
    assert [one.bytes for one in plain.tensors] == [2 * one.bytes for one in half.tensors]
    assert [one.parameter_bytes for one in plain.layers] == [one.parameter_bytes for one in half.layers]
    saved = {layer.name: layer.saved_bytes for layer in half.layers}
    # What a matrix product keeps: its weight in bfloat16, a copy that only autograd holds. Its input is counted where
    # it was made.
    assert saved["2"] >= 2 * 64 * 64
    assert plain.graph_hash != half.graph_hash
