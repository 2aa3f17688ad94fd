"""Frozen weights with trained adapters: training in stages, sizes in a profile, and the export of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from data_parallel_runs import AdaptedChain, Case, OneProcess, reference
from msgspec import structs
from safetensors.torch import load_file
from saved import model_of, save
from stagewise import train_beside_one_process

from pipeplan.profiler.outcome import charged_parameters, layer_fields, tied_weights
from pipeplan_launch import Job, export, load_job
from pipeplan_launch.checkpoint.checkpoint import find_checkpoint
from pipeplan_launch.tracing.trace import trace_job

WIDTH = 8
MATRIX = 4 * WIDTH * WIDTH


def job_of(**options: bool) -> Job:
    torch.manual_seed(0)
    return Job(AdaptedChain(WIDTH, **options), inputs=lambda n: torch.randn(n, WIDTH))


def test_stages_train_adapters_as_one_process_does() -> None:
    """Frozen weights in 32 or 8 bits, one of them at both ends, and with gradient checkpointing in the model."""
    for options in ({}, {"eight_bits": True}, {"checkpoints": True}, {"eight_bits": True, "checkpoints": True}):
        for seed in range(2):
            traced = train_beside_one_process(job_of(**options), seed=seed, evaluates="checkpoints" not in options)
            assert traced.tied == traced.together == ()


def test_a_layer_has_trained_bytes_and_stored_bytes_of_frozen_weights() -> None:
    for eight_bits in (False, True):
        traced = trace_job(job_of(eight_bits=eight_bits), 2)
        fields = {info.name: one for info, one in layer_fields(traced, {})}
        own = charged_parameters(traced)
        base, down = fields["blocks.0.base"], fields["blocks.0.down"]
        assert (down["parameter_bytes"], down["frozen_bytes"], down["buffer_bytes"]) == (8 * WIDTH, 0, 0)
        stored = MATRIX // 4 + 4 * WIDTH if eight_bits else MATRIX
        assert base["frozen_bytes"] == base["buffer_bytes"] == stored + 4 * WIDTH  # and the bias
        assert (base["parameter_bytes"], own["blocks.0.base"]) == (0, ())
        readers = [one for one in fields.values() if one["frozen_bytes"] == MATRIX and "blocks" not in one["name"]]
        assert len(readers) == 2, "every layer that reads a frozen weight is charged for it"
        assert tied_weights(traced) == ()


@pytest.mark.parametrize("name", ["adapted", "adapted_in_eight_bits"])
def test_ddp_and_fsdp_train_adapters_as_one_process_does(tmp_path: Path, name: str) -> None:
    """Frozen weights stay as they are, and trained ones differ by rounding alone."""
    before = dict(load_job(reference(name), 0).model.named_parameters())
    one_process = OneProcess(load_job(reference(name), 0), replicas=2, accumulate=2)
    one_process.train(1)
    for mode in ("ddp", "fsdp"):
        run = Case(name, mode, replicas=2, accumulate=2).train(tmp_path / mode, "--epochs", "1")
        found = model_of(find_checkpoint(run))
        for key, expected in one_process.named.items():
            if expected.requires_grad:
                assert not torch.equal(found[key], before[key]), key
                torch.testing.assert_close(found[key], expected.detach())
            elif mode == "ddp":
                assert key not in found, "a frozen weight is as the job builds it"
            else:
                assert torch.equal(found[key], before[key]), key


def test_frozen_weights_are_not_saved_but_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ddp, fsdp = (Case("adapted", mode, replicas=2, accumulate=2) for mode in ("ddp", "fsdp"))
    run = ddp.train(tmp_path / "ddp", "--epochs", "1")
    manifest = find_checkpoint(run)
    built = dict(load_job(reference("adapted"), 0).model.named_parameters())
    assert {f"model.{name}" for name, one in built.items() if not one.requires_grad} == manifest.frozen.keys()
    assert export.main([str(run), "-o", str(tmp_path / "model.pt")]) == 0
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert exported.keys() == built.keys()
    assert torch.equal(exported["first.weight"], built["first.weight"])
    two = model_of(find_checkpoint(ddp.train(tmp_path / "more", "--epochs", "2", "--resume-from", str(run))))
    for case in (ddp, fsdp):
        again = case.train(tmp_path / f"two-{case.mode}", "--epochs", "2", "--resume-from", str(run))
        found = model_of(find_checkpoint(again))
        for name, value in two.items():
            torch.testing.assert_close(found[name], value)

    # A job that now builds other frozen weights, and a frozen weight that changed since it was built.
    (name,) = [name for name in manifest.frozen if name == "model.first.weight"]
    other = structs.replace(manifest, frozen={**manifest.frozen, name: manifest.frozen[name] ^ 1})
    other.write(manifest.folder)
    assert export.main([str(run), "-o", str(tmp_path / "other.pt")]) == 2
    said = "does not hold the frozen weight 'first.weight', and the job now builds it with other values"
    assert said in capsys.readouterr().err
    ended = fsdp.start(fsdp.write(tmp_path / "refused"), "--epochs", "2", "--resume-from", str(run))
    assert 2 in ended.statuses
    assert said in ended.err


PEFT = """
import torch
from data_parallel_runs import AdaptedChain
from pathlib import Path
from safetensors.torch import save_file
from pipeplan_launch import Job


class Wrapped(AdaptedChain):
    peft_config = {"default": None}

    def save_pretrained(self, folder):
        Path(folder).mkdir()
        trained = {name: one.data for name, one in self.named_parameters() if one.requires_grad}
        save_file(trained, Path(folder, "adapter_model.safetensors"))


def wrapped():
    return Job(Wrapped(8), inputs=lambda n: torch.randn(n, 8))


def bare():
    return Job(AdaptedChain(8), inputs=lambda n: torch.randn(n, 8))
"""
"""A model with what peft's have: its configuration, and a method that saves adapters alone."""


def test_adapters_are_exported_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tuned.py").write_text(PEFT)
    state = {name: value + 1 for name, value in AdaptedChain(WIDTH).state_dict().items()}
    named = {f"model.{name}": value for name, value in state.items()}
    names = {name: name for name in state}
    out = tmp_path / "adapter"
    for function, status in (("wrapped", 0), ("bare", 2)):
        run = tmp_path / function
        save(run, named, state_dict=names, model_ref=f"{tmp_path}/tuned.py:{function}")
        assert export.main([str(run), "-o", str(out), "--adapter", "--force"]) == status
        written = load_file(out / "adapter_model.safetensors")
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in written} == {"down", "up"}
        assert all(torch.equal(value, state[name]) for name, value in written.items())
    assert export.main([str(tmp_path / "wrapped"), "-o", str(out), "--adapter"]) == 2
    assert "has no adapters of peft" in capsys.readouterr().err
