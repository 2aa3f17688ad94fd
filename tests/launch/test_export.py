"""A checkpoint becomes the state_dict of the user's own module, and the stages of any other cut of it."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from extents import slow_but_for
from saved import save
from torch import Tensor, nn
from torch.nn import functional
from traced_zoo import build

from pipeplan_launch import Job, export
from pipeplan_launch.checkpoint import checkpoint
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime import stage_checkpoint
from pipeplan_launch.tracing.split import StageProgram, build_stage_program
from pipeplan_launch.tracing.trace import TracedModel, trace_job


class Odd(nn.Module):
    """Ties and buffers of every kind: read, unread, kept, left out, under two names, renamed by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never_called = nn.Linear(3, 2)
        self.alias = self.never_called
        self.unread = nn.Parameter(torch.randn(3))
        self.second.bias = self.first.bias
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("same_table", self.table)
        self.register_buffer("left_out", torch.randn(4), persistent=False)
        self.register_buffer("positions", torch.arange(5))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.tanh(self.first(x)) * self.table) + self.left_out)


def job_of(name: str, seed: int) -> Job:
    torch.manual_seed(seed)
    if name == "odd":
        return Job(Odd(), inputs=lambda n: torch.randn(n, 4), loss=functional.mse_loss)
    return build(name)


def cuts(traced: TracedModel) -> list[list[list[str]]]:
    """Pipelines of two stages that the model can be cut into."""
    layers = [layer.name for layer in traced.layers]
    found = []
    for at in range(1, len(layers)):
        pipeline = [layers[:at], layers[at:]]
        try:
            build_stage_program(traced, pipeline, 0)
        except LaunchError:
            continue
        found.append(pipeline)
    return found


def stages(traced: TracedModel, pipeline: list[list[str]]) -> list[StageProgram]:
    return [build_stage_program(traced, pipeline, stage) for stage in range(len(pipeline))]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def trained(name: str, run: Path) -> nn.Module:
    """A model whose parameters and buffers are those of no fresh one; its stages have written a checkpoint."""
    traced = trace_job(job_of(name, 1), 2)
    programs = stages(traced, cuts(traced)[0])
    with torch.no_grad():
        for number, tensor in enumerate(traced.model.state_dict().values()):
            tensor.add_(number + 1)
    state = {name: value for program in programs for name, value in stage_checkpoint.model_state(program).items()}
    save(run, state, state_dict=programs[-1].naming.state_dict)
    return traced.model


MODELS = ["mnist", "keeps-state", "odd", "resnet-tiny", "gpt"]


@pytest.mark.parametrize("name", slow_but_for(MODELS[:3], MODELS))
def test_the_users_own_module_and_other_cuts_take_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The module strictly; and stages, also the one of one process."""
    model = trained(name, tmp_path / "run")
    whole = {key: value.clone() for key, value in state_of(model).items()}  # running the model may change it
    assert export.main([str(tmp_path / "run"), "-o", str(tmp_path / "model.pt")]) == 0
    assert f"{len(model.state_dict())} tensors" in capsys.readouterr().out
    content, expected = torch.load(tmp_path / "model.pt", weights_only=True), model.state_dict()
    assert list(content) == list(expected)
    for key, value in content.items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key])
    fresh, inputs = job_of(name, 2).model, job_of(name, 3).example_inputs(2)
    fresh.load_state_dict(content, strict=True)
    model.eval(), fresh.eval()
    if name != "odd":  # whose output needs what no state_dict has
        assert torch.equal(model(*inputs), fresh(*inputs))
    manifest = checkpoint.find_checkpoint(tmp_path / "run")
    for alone in (True, False):
        other = trace_job(job_of(name, 2), 2)
        pipeline = [[layer.name for layer in other.layers]] if alone else cuts(other)[-1]
        for program in stages(other, pipeline):
            stage_checkpoint.load_weights(manifest, program, {})
        found = state_of(other.model)
        assert found.keys() == whole.keys()
        assert all(torch.equal(value, whole[key]) for key, value in found.items())


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    model = trained("gpt", tmp_path)
    manifest = checkpoint.find_checkpoint(tmp_path)
    assert manifest.state_dict["head.weight"] == "tokens.weight"
    assert "model.head.weight" not in manifest.tensors
    content = export.exported_state_dict(manifest)
    assert content["head.weight"].data_ptr() == content["tokens.weight"].data_ptr()
    assert content.keys() == model.state_dict().keys()


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is there is replaced only by force."""
    tensors = {"model.w": torch.ones(2)}
    for name, names in (("run", {"w": "w"}), ("nameless", {}), ("partial", {"w": "w", "absent": "absent"})):
        save(tmp_path / name, tensors, state_dict=names)
    there = tmp_path / "there.pt"
    there.write_text("before")
    before = sorted(tmp_path.iterdir())
    for source, output, says in (
        ("none", "model.pt", "none is neither a checkpoint nor a run folder"),
        ("run", "no/model.pt", r"writing .*no/model\.pt failed: No such file or directory"),
        ("run", "run", "run is a folder: name the file to write"),
        ("nameless", "model.pt", "does not list the names of the model's state_dict: it cannot be exported"),
        ("partial", "model.pt", "has no 'model.absent'"),
        ("run", "there.pt", r"there\.pt exists; give another path with -o, or --force to replace it"),
    ):
        assert export.main([str(tmp_path / source), "-o", str(tmp_path / output)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(f"^error: .*{says}", line)
    assert sorted(tmp_path.iterdir()) == before
    assert there.read_text() == "before"
    assert export.main([str(tmp_path / "run"), "-o", str(there), "--force"]) == 0
    assert torch.load(there, weights_only=True)["w"].tolist() == [1.0, 1.0]


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model.w": torch.ones(5000)}, state_dict={"w": "w"})
    output = tmp_path / "model.pt"
    output.write_text("before")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        try:
            export.export_checkpoint(tmp_path / "run", output, force=True)
        except LaunchError as error:
            os._exit(2 if str(error) == f"writing {output} failed: File too large" else 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "run"]
