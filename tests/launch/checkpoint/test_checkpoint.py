"""Checkpoints are whole or absent, hold no code that is run, and are refused where they are damaged or do not fit."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved import latest, model_of, rewrite, save
from torch import Tensor

from pipeplan_launch.checkpoint import checkpoint, tensor_store
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX, History, Position, read_manifest
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import is_unchanged


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {
        f"{MODEL_PREFIX}a": torch.full((300, 3), value),
        f"{MODEL_PREFIX}b": torch.full((2,), value, dtype=torch.bfloat16),
        "optim.state.a.step": torch.tensor(value),
    }


def test_the_latest_complete_one_is_found(tmp_path: Path) -> None:
    """In order of the samples, whatever minibatches they came in; two are kept."""
    assert checkpoint.latest_checkpoint(tmp_path) is None
    save(tmp_path, tensors(1), Position(0, 9, 10), minibatch_samples=2)
    save(tmp_path, tensors(2), Position(0, 10, 10), minibatch_samples=2, history=History([{"epoch": 1}]))
    third = save(tmp_path, tensors(3), Position(10, 3, 10), minibatch_samples=200)
    fourth = save(tmp_path, tensors(4), Position(10, 301, 1000), minibatch_samples=2)
    manifest = latest(tmp_path)
    assert (manifest.folder, manifest.seed, manifest.model.graph_hash) == (fourth, 7, "sha256:toy")
    assert manifest.position == Position(10, 301, 1000)
    assert torch.equal(model_of(manifest)["a"], torch.full((300, 3), 4.0))
    assert model_of(manifest)["b"].dtype == torch.bfloat16
    assert sorted((tmp_path / "checkpoints").iterdir()) == [third, fourth]
    assert checkpoint.find_checkpoint(third).position == Position(10, 3, 10)
    assert checkpoint.find_checkpoint(tmp_path) == manifest
    with pytest.raises(LaunchError, match="neither a checkpoint nor a run folder"):
        checkpoint.find_checkpoint(tmp_path / "checkpoints")
    save(tmp_path / "lost", tensors(), history=History([], float("nan"), 4))
    assert str(latest(tmp_path / "lost").history.loss) == "nan"


def in_child(call: Callable[[], int]) -> int:
    """How a child process ends whose status the call returns; negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = call()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_ended_between_any_two_steps(tmp_path: Path) -> None:
    """Before the n-th time that a file is opened, moved or removed, for every n: what is found is whole."""
    for value in (1, 2):
        save(tmp_path, tensors(value), Position(value, 0, 10))

    def save_until(left: int, value: int) -> int:
        steps = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in steps and str(tmp_path) in str(arguments[0]):
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(count)
        save(tmp_path, tensors(value), Position(value, 0, 10))
        return 0

    steps, status = 0, 9
    while status == 9:
        steps, before = steps + 1, latest(tmp_path).position.epoch
        status = in_child(lambda: save_until(steps, before + 1))  # noqa: B023
        found = latest(tmp_path)
        assert found.position.epoch in (before, before + 1)
        assert torch.equal(model_of(found)["a"], torch.full((300, 3), float(found.position.epoch)))
        assert len(checkpoint.complete_checkpoints(tmp_path)) >= 2
    assert status == 0
    assert steps > 15
    assert found.position.epoch == before + 1
    assert len(checkpoint.complete_checkpoints(tmp_path)) == checkpoint.KEPT_CHECKPOINTS
    save(tmp_path, tensors(), Position(before + 2, 0, 10))
    assert len(list((tmp_path / "checkpoints").iterdir())) == checkpoint.KEPT_CHECKPOINTS, (
        "what was half removed is gone"
    )


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "disk full"])
def test_a_write_cut_off_at_any_byte(tmp_path: Path, killed: bool) -> None:
    """The kernel refuses every byte of a file from the n-th on, and ends the process or only says so."""
    before = save(tmp_path, tensors(1.0))
    largest = max(path.stat().st_size for path in before.iterdir())

    def save_within(limit: int) -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if killed else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            save(tmp_path, tensors(2.0), Position(1, 0, 10))
        except LaunchError as error:
            return 2 if "File too large" in str(error) and "\n" not in str(error) else 3
        return 0

    for limit in (0, 1, 100, 700, *range(1500, largest, 900)):
        assert in_child(lambda: save_within(limit)) == (-signal.SIGXFSZ if killed else 2), limit  # noqa: B023
        assert torch.equal(model_of(latest(tmp_path))["a"], torch.ones(300, 3))
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [before.name]
    assert in_child(lambda: save_within(largest + 10_000)) == 0
    assert latest(tmp_path).position.epoch == 1
    assert not (tmp_path / checkpoint.PARTIAL_CHECKPOINT).exists()


def refusal(run: Path) -> str:
    """The line with which a checkpoint is refused; "" if it is read as it was written."""
    line = ""
    try:
        found = model_of(latest(run))["a"]
    except LaunchError as error:
        line = str(error)
    else:  # not every byte says something about a tensor
        assert torch.equal(found, tensors()[f"{MODEL_PREFIX}a"])
    assert "\n" not in line
    return line


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    """Missing, cut off anywhere, exchanged, or with any byte of a tensor changed."""
    folder = save(tmp_path, tensors())
    (data,) = folder.glob("*.safetensors")
    whole = data.read_bytes()
    data.unlink()
    assert "is missing" in refusal(tmp_path)
    for length in range(0, len(whole), 97):
        data.write_bytes(whole[:length])
        assert re.search(r"safetensors is missing or not of the \d+ bytes", refusal(tmp_path))
    refused = 0
    for place in range(0, len(whole), 97):
        data.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        line = refusal(tmp_path)
        refused += bool(line)
        assert not line or re.fullmatch(rf"{re.escape(str(data))} (is|does) .*: it was damaged or exchanged", line)
    assert refused > 30
    (other,) = save(tmp_path / "other", tensors(2.0)).glob("*.safetensors")
    assert other.stat().st_size == len(whole)
    data.write_bytes(other.read_bytes())
    assert re.search("does not hold the values written for .*: it was damaged or exchanged", refusal(tmp_path))


def test_a_damaged_manifest_is_one_line(tmp_path: Path) -> None:
    path = save(tmp_path, tensors(), state_dict={"a": "a", "b": "b"}) / "manifest.json"
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 53):
        path.write_bytes(whole[:length])
        assert refusal(tmp_path)
    content = json.loads(whole)
    for key in content:
        for value in (None, [], {}, -1, "x", [1], {"x": 1}, [{}], 2**80):
            rewrite(path, {**content, key: value})
            try:
                latest(tmp_path)
            except LaunchError:
                continue
            may = key in ("state_dict", "tensors", "seed", "plan", "checksum") or value in ({"x": 1}, {})
            assert may, (key, value)
    path.write_text("[" * 100_000)
    assert "cannot be read" in refusal(tmp_path)
    assert is_unchanged(whole)
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        assert not is_unchanged(bytes(flipped)), place
        if place % 101 == 0:
            path.write_bytes(flipped)
            assert refusal(tmp_path)


def test_the_one_before_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    for damaged in ("manifest.json", "*.safetensors"):
        run = tmp_path / damaged[:1]
        before, last = [save(run, tensors(), Position(0, number, 10)) for number in (1, 2, 3)][1:]
        (path,) = last.glob(damaged)
        path.write_bytes(path.read_bytes()[:-1])
        notes: list[str] = []
        found = checkpoint.latest_checkpoint(run, notes.append)
        assert found is not None
        assert found.folder == before
        (line,) = notes
        assert line.startswith(str(path))
        assert line.endswith("; going back to the checkpoint before it")


def test_a_checkpoint_with_finite_losses_stays(tmp_path: Path) -> None:
    """Checkpoints of a training whose loss is lost do not take their places, nor does a damaged one."""
    save(tmp_path, tensors(), Position(0, 1, 10), history=History([], 1.0, 1))
    good = [save(tmp_path, tensors(), Position(0, number, 10), history=History([], 2.0, 2)) for number in (2, 3)]
    bad = [save(tmp_path, tensors(), Position(0, at, 10), history=History([], float("nan"), at)) for at in (4, 5, 6)]
    assert checkpoint.complete_checkpoints(tmp_path) == [*good, *bad[1:]]
    results = [{"epoch": 1, "loss": None}]
    epoch = [save(tmp_path, tensors(), Position(0, 10, 10), history=History(results))]
    assert checkpoint.complete_checkpoints(tmp_path) == [*good, bad[-1], *epoch]
    finite = [save(tmp_path, tensors(), Position(1, at, 10), history=History(results, 1.0, at)) for at in (1, 2)]
    assert checkpoint.complete_checkpoints(tmp_path) == finite


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_loading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file holds a pickle that would run something: one line, or the file is not read at all."""
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path, {**tensors(), f"{MODEL_PREFIX}large": torch.zeros(2000)})
    pickled, archived = pickle.dumps(Bomb(), protocol=2), io.BytesIO()
    torch.save(Bomb(), archived)
    for bomb, path in itertools.product((pickled, archived.getvalue()), sorted(folder.iterdir())):
        whole = path.read_bytes()
        for written in (bomb, bomb.ljust(len(whole), b"\0")):
            path.write_bytes(written)
            with pytest.raises(LaunchError, match=rf"^{re.escape(str(folder))}") as caught:
                model_of(latest(tmp_path))
            assert "\n" not in str(caught.value)
            assert "weights_only" not in str(caught.value)
            assert not Path("exploded").exists()
        path.write_bytes(whole)
    pickle.loads(pickled)
    assert Path("exploded").exists(), "the bomb is one"


def test_a_manifest_that_does_not_fit_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, tensors()) / "manifest.json"
    content, name = json.loads(path.read_text()), f"{MODEL_PREFIX}a"
    tensor = content["tensors"][name]
    of_tensor: Any = (
        ({"dtype": "load"}, "of dtype 'load', which no parameter can have"),
        ({"dtype": "quint8"}, "of dtype 'quint8', which no parameter can have"),
        ({"dtype": "float64"}, "does not hold the values written"),
        ({"shape": [10**9, 10**9]}, "does not fit into the file"),
        ({"shape": [3, 300]}, "does not hold the values written"),
        ({"file": "../../x"}, "does not fit into the file"),
        ({"crc32": 1}, "was damaged or exchanged"),
    )
    for change, says in (
        *(({"tensors": {**content["tensors"], name: tensor | change}}, says) for change, says in of_tensor),
        ({"plan": "\ud800"}, "half a character"),
        ({"files": {"../x": 1}}, "is not the name of a file beside it"),
        ({"files": {"a/b": 1}}, "is not the name of a file beside it"),
    ):
        rewrite(path, {**content, **change})
        assert says in refusal(tmp_path)
    assert not [one for one in caplog.records if one.name.startswith("torch.")], "torch says nothing of its own"


def test_other_versions_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, tensors()) / "manifest.json"
    old = path.parent.rename(tmp_path / "checkpoints" / "epoch-0001")
    for version, says in ((1, "written by an older pipeplan"), (99, "upgrade pipeplan")):
        (old / "manifest.json").write_text(json.dumps({"format": "pipeplan-checkpoint", "version": version}))
        assert says in refusal(tmp_path)
    (old / "manifest.json").write_text(json.dumps({"format": "something"}))
    with pytest.raises(LaunchError, match="is not the manifest of a checkpoint"):
        read_manifest(old)


def test_tensors_must_fit_but_for_dtypes_and_strides(tmp_path: Path) -> None:
    value = torch.arange(24.0).reshape(1, 2, 3, 4)
    save(tmp_path, {"model.w": value.to(memory_format=torch.channels_last), "model.n": torch.tensor(3)})
    for targets, says in (
        ({"model.c": torch.zeros(2)}, "has no 'c'"),
        ({"model.n": torch.zeros(3)}, r"'n' is \(\), the model's is \(3,\)"),
    ):
        with pytest.raises(LaunchError, match=says):
            tensor_store.fill_tensors(latest(tmp_path), targets)
    last = torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)
    for target in (torch.zeros(1, 2, 3, 4, dtype=torch.float64), last):
        number = torch.tensor(0)
        tensor_store.fill_tensors(latest(tmp_path), {"model.w": target, "model.n": number})
        assert torch.equal(target.float(), value)
        assert number == 3
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    """Also those that share memory, and numbers that safetensors does not have."""
    base = torch.arange(12.0)
    kinds = [torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
    saved = {f"{MODEL_PREFIX}{kind}": base.to(kind) for kind in (*kinds, torch.complex64, torch.complex128)}
    saved |= {"all": base, "same": base, "part": base[3:6], "strided": base[::2], "none": base[:0]}
    saved |= {"conjugate": saved[f"{MODEL_PREFIX}torch.complex128"].mul(1j).conj(), "number": torch.tensor(2 + 1j)}
    folder = save(tmp_path, saved)
    found = tensor_store.load_tensors(latest(tmp_path), saved)
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].resolve_conj().to(torch.complex128), tensor.to(torch.complex128)), name
    assert torch.equal(load_file(folder / "tensors-0.safetensors")["part"], base[3:6]), "safetensors itself reads it"


def test_no_room_to_write_in_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run folder should be")
    with pytest.raises(LaunchError, match=r"making .*run/\.checkpoint\.part failed: "):
        save(tmp_path / "run", tensors())
