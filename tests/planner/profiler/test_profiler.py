"""Profiles of real models, and what is said of models that cannot be profiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import Run

from pipeplan.cli.profile.table import measured_profile
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model

JOBS = """
from collections import OrderedDict
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

class Fixed(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(8, 4)

def nan_inside(): return job(nn.Sequential(OrderedDict(deep=nn.Sequential(OrderedDict(inner=Log())))))
def fixed(): return job(Fixed(4, 4))
def branches(): return job(Branches(4, 4))
def wrong_shape(): return job(width=5)
def loss_of_many(): return job(loss=lambda output, target: output)
def loss_nan(): return job(loss=lambda output, target: output.sum() * float("inf") * 0)
def loss_fails(): return job(loss=lambda output, target: output[99].sum())
def frozen(): return job(nn.Linear(4, 4).requires_grad_(False), loss=lambda output, target: output.sum())
def nothing(): return None
def loss_of_torch(): return job(loss=torch.nn.functional.poisson_nll_loss)

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
Step = tuple[int, int, str]


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A file of jobs."""
    (tmp_path / "jobs.py").write_text(JOBS)
    return tmp_path / "jobs.py"


def profile_of(done: list[Step] | None = None, ref: str = "mnist", **options: Any) -> Profile:
    """The profile of a job, by two passes over eight samples unless told otherwise."""
    chosen = ProfilerOptions(**{"batches": (8,), "repeats": 2, "warmup": 1, **options})
    return profile_model(ref, chosen, lambda *step: done.append(step) if done is not None else None)


def test_profile_of_mnist() -> None:
    steps: list[Step] = []
    profile = profile_of(steps)
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
    assert (profile.provenance.repeats, profile.provenance.kind) == (2, "measured")
    stepped = {name for name, layer in layers.items() if layer.update_s > 0}
    assert {"fc1", "fc2"} <= stepped <= {"conv1", "conv2", "fc1", "fc2", "out"}
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    assert 4 * parameters < profile.peak_bytes < 7 * parameters
    assert layers["conv2"].workspace_bytes > 0
    assert (profile.provenance.torch, profile.sizes, profile.batch_norm) == (torch.__version__, (), False)
    assert profile.whole_forward_s > 0 < profile.whole_backward_s
    assert profile.whole_split_s
    assert (1, 2, "measuring") in steps
    assert steps[-1] == (1, 1, "done")


def test_buffers_skips_and_halves_of_the_minibatch(tmp_path: Path) -> None:
    """Of a model with skips and BatchNorm."""
    profile = profile_of(ref="resnet-tiny", batches=(12,), halvings=3)
    assert (profile.optimizer_name, profile.optimizer_state_ratio) == ("SGD", 1.0)
    layers = {layer.name: layer for layer in profile.layers}
    assert layers["bn"].buffer_bytes == 2 * 16 * 4 + 8
    relu = next(tensor for tensor in profile.tensors if tensor.name == "relu")
    assert relu.consumers == ("stages.0.0.conv1", "stages.0.0.add")
    assert [size.minibatch for size in profile.sizes] == [6, 3]
    assert profile.sizes[0].tensors[0].bytes * 2 == profile.tensors[0].bytes
    assert all(sum(layer.forward_s for layer in size.layers) > 0 for size in profile.sizes)
    assert profile.batch_norm
    assert any(note.startswith("BatchNorm normalises over one microbatch") for note in profile.provenance.notes)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_ties_are_charged_once(jobs: Path) -> None:
    profile = profile_of(ref=f"{jobs}:tied")
    assert sum(layer.parameter_bytes for layer in profile.layers) == (5 * 4 + 5) * 4
    assert not profile.together
    assert profile.tied == (TiedWeights(("a.weight = b.weight",), ("a", "b"), 5 * 4 * 4),)
    assert "sum of the outputs" in profile.provenance.how
    assert profile.lacks == ("loss", "data")
    said = "the job has no loss and no data, so that it can be planned, but launch.sh cannot train it: return Job("
    assert [note for note in profile.provenance.notes if note.startswith(said)]


def test_a_size_that_the_model_cannot_run_is_left_out_and_named(jobs: Path) -> None:
    """BatchNorm over single values fails in training, and a model may have one size."""
    profile = profile_of(ref=f"{jobs}:normalised", batches=(4,), halvings=3)
    assert [size.minibatch for size in profile.sizes] == [2]
    (note,) = [note for note in profile.provenance.notes if "was not measured" in note]
    assert note.startswith("microbatch 1, and anything smaller, was not measured: ")
    fixed = profile_of(ref=f"{jobs}:fixed", repeats=1, halvings=3)
    assert (fixed.sizes, fixed.dynamic_batch) == ((), False)
    damaged = profile_of(ref=f"{jobs}:damaged", batches=(4,), repeats=1)
    assert damaged.read_s == 0
    (said,) = [note for note in damaged.provenance.notes if "reading samples was not measured" in note]
    assert "sample 7 is damaged" in said


ERRORS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("mnits", {}, "did you mean 'mnist'"),
    ("FILE:nan_inside", {}, r"layer 'deep.inner.log' \(in the module 'deep.inner'\) of .* produces NaN"),
    ("FILE:branches", {}, r"depends on the data \(.*jobs.py:21: return y if y.sum\(\) > 0 else -y\)"),
    ("FILE:wrong_shape", {}, r"fails on its example inputs \(8×5\)"),
    ("FILE:loss_of_many", {}, r"must be a single number, not \(8, 4\)"),
    ("FILE:loss_nan", {}, "the loss of .* is nan"),
    (
        "FILE:loss_fails",
        {},
        r"on a microbatch of its data: the job's loss \(lambda of .*jobs.py:33\) failed: IndexError: .*jobs.py:33",
    ),
    # No line of pipeplan's own is quoted where no line of the job's is to blame.
    ("FILE:loss_of_torch", {}, r"data: the job's loss \(poisson_nll_loss\) failed: RuntimeError: .* dimension 1$"),
    ("FILE:frozen", {}, "does not depend on any parameter"),
    ("FILE:nothing", {}, "returned NoneType"),
    ("mnist", {"batches": (0,)}, "microbatch size must be at least 1, not 0"),
    ("mnist", {"repeats": -1}, "repeats must be at least 1, not -1"),
    ("mnist", {"halvings": -1}, "halvings must be at least 0, not -1"),
    ("mnist", {"batches": (8, 16, 8)}, "a microbatch size is given twice: 8, 16, 8"),
    ("FILE:fixed", {"batches": (8, 16)}, "can only be traced for one microbatch size at a time"),
    ("mnist", {"threads": 0}, "threads must be at least 1, not 0"),
    ("mnist", {"device": "tpu"}, "there is no device 'tpu'"),
)
"""A model, options, and what is said of them."""


def test_errors(jobs: Path) -> None:
    for ref, options, says in ERRORS:
        with pytest.raises(InputError, match=says) as caught:
            profile_of(ref=ref.replace("FILE", str(jobs)), **{"repeats": 1, **options})
        assert "\n" not in str(caught.value)


def test_the_command_prints_a_table_or_json_alone(jobs: Path, run: Run) -> None:
    shown = run("profile", "jobs.py:talks", "--repeats", "1")
    assert (shown.code, "Sum / whole" in shown.out) == (0, True)
    assert Profile.load("profile.json").minibatch == 32
    ref = f"{jobs}:talks"
    result = run("profile", ref, "--json", "--microbatch", "4", "--repeats", "1", "-o", "out.json")
    printed, written = json.loads(result.out), json.loads(Path("out.json").read_text())
    assert (printed["model"].pop("ref"), written["model"].pop("ref")) == (ref, "jobs.py:talks")
    assert printed == written, "the file alone has the job relative to its folder"
    assert written["minibatch"] == 4


def test_the_profile_says_how_the_model_was_traced(jobs: Path) -> None:
    """Models that are called by keyword are profiled as others are."""
    for name, traced in (("by_keyword", "torch.export"), ("chooses", "torch.export; taken whole: part")):
        profile = profile_model(f"{jobs}:{name}", ProfilerOptions(repeats=2))
        assert [layer.name for layer in profile.layers] == ["first", "add", "part", "last", "loss"]
        assert profile.layers[2].parameter_bytes == 4 * (8 * 8 + 8)
        profile.save(jobs.parent / "profile.json")
        assert Profile.load(jobs.parent / "profile.json").provenance.traced == profile.provenance.traced == traced
        lines = [line for line in measured_profile(profile) if isinstance(line, str)]
        assert [line for line in lines if line.startswith("Traced")] == [f"Traced by {traced}"] * (name == "chooses")


def test_activations_take_half_the_bytes_under_autocast(jobs: Path) -> None:
    plain, half = (profile_of(ref=f"{jobs}:{name}") for name in ("classifies", "in_half"))
    assert [one.bytes for one in plain.tensors] == [2 * one.bytes for one in half.tensors]
    assert [one.parameter_bytes for one in plain.layers] == [one.parameter_bytes for one in half.layers]
    # What a matrix product keeps: its weight in bfloat16, a copy that only autograd holds. Its input is counted where
    # it was made.
    assert {layer.name: layer.saved_bytes for layer in half.layers}["2"] >= 2 * 64 * 64
    assert plain.graph_hash != half.graph_hash
