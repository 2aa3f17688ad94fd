"""Training goes on where a checkpoint is: in the middle of an epoch, before an evaluation, under another plan."""

from __future__ import annotations

import json
import resource
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extents import slow_but_for
from msgspec import structs
from saved import latest, marks, model_of, rewrite, save
from torch.distributed import HashStore  # type: ignore[attr-defined]
from toy_workers import Toy, initial, initial_buffers, run_toy, stage_contents, write_plan

from pipeplan_launch import export
from pipeplan_launch.checkpoint import checkpoint
from pipeplan_launch.checkpoint.manifest import History, Position
from pipeplan_launch.elastic.rendezvous import Attempt
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.runtime import run_start
from pipeplan_launch.runtime.data import MinibatchSizes
from pipeplan_launch.runtime.epochs import position_in, segment_end
from pipeplan_launch.runtime.stage_setup import RunOptions
from pipeplan_launch.telemetry import run_folder

EVERY = ("--checkpoint-minibatches", "6")
TOY = Toy("adamw-fused")  # 20 minibatches of 2


def launch(folder: Path, toy: Toy, replicas: Sequence[int], *arguments: str, **plan: Any) -> tuple[list[int], str]:
    """(statuses, what was said on stderr) of a run in `folder / "run"`, unless the arguments name another."""
    ended = run_toy(folder, toy, replicas, *arguments, **plan)
    return ended.statuses, ended.err


def train(folder: Path, toy: Toy, replicas: Sequence[int], *arguments: str, **plan: Any) -> str:
    statuses, said = launch(folder, toy, replicas, *arguments, **plan)
    assert statuses == [0] * sum(replicas), said
    return said


def epochs(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "summary.json").read_text())["epochs"]
    return found


def lines(run: Path, first_rank: int = 0) -> list[tuple[int, int, float]]:
    """(epoch, minibatch, loss) in the metrics of the last stage, whose ranks begin with this one, sorted."""
    paths = [path for path in run.glob("metrics/rank-*.jsonl") if int(path.stem.partition("-")[2]) >= first_rank]
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return sorted((line["epoch"], line["minibatch"], line["loss"]) for line in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, TOY, [2, 1], "--epochs", "2", *EVERY)
    return folder / "run"


STASHING, EF = ("1f1b-stashing", None), ("--correction", "ef")
INTERRUPTED: list[Any] = [
    (*STASHING, [2, 1], (1, 13), "6"),  # in the evaluation
    ("2bw", 4, [2, 1], (2, 35), "8"),
    (*STASHING, [2, 1], (1, 31), "6"),
    ("vertical-sync", None, [2, 1], (2, 35), "8"),
    ("gpipe", 4, [2, 1], (2, 35), "8"),
    ("1f1b-flush", 4, [2, 1], (2, 35), "8"),
    (*STASHING, [2, 1], (2, 35), "8", *EF),
    ("2bw", 4, [1, 1, 1], (2, 35), "8", *EF),
]
"""Schedule, replicas, at which forward pass of which worker it is killed, how often it saves, and options."""


@pytest.mark.parametrize("case", slow_but_for(INTERRUPTED[:2], INTERRUPTED), ids=str)
def test_equals_a_run_that_nothing_interrupted(tmp_path: Path, case: Any) -> None:
    """Bit by bit; corrected updates also go on under a plan with other delays, the last steps being in a checkpoint."""
    schedule, accumulate, replicas, die, every, *options = case
    plan = {"schedule": schedule, "accumulate": accumulate}
    arguments, run = ("--epochs", "2", "--checkpoint-minibatches", every, *options), tmp_path / "run"
    said, whole = train(tmp_path / "whole", TOY, replicas, *arguments, **plan), tmp_path / "whole" / "run"
    statuses, _ = launch(tmp_path, replace(TOY, die=die), replicas, *arguments, **plan)
    assert statuses[die[0]] == 9
    found = latest(run)
    assert (found.position.epoch, found.position.minibatch) == (int(die[1] == 31), 20)
    resumed = train(tmp_path, TOY, replicas, *arguments, "--resume", **plan)
    assert f"resumed from {found.folder}, after {found.position}" in resumed
    assert marks(run) == marks(whole)
    assert epochs(run) == epochs(whole)
    last = sum(replicas) - 1
    assert lines(run, last) == lines(whole, last), "every minibatch once, with the same loss"
    losses = [loss for epoch, _, loss in lines(whole, last) if epoch == 0]
    assert len(losses) == 20
    assert epochs(whole)[0]["loss"] == pytest.approx(sum(losses) / 20, rel=1e-6)
    assert ("note: updates are corrected for old gradients" in said) == bool(options)
    assert any(name.startswith("correction.one.weight.") for name in marks(run)["tensors"]) == bool(options)
    if options:
        middle = checkpoint.complete_checkpoints(run)[0]
        train(tmp_path / "other", TOY, [1, 2], "--resume-from", str(middle), *options, "--epochs", "2")


@pytest.mark.parametrize("corrected", slow_but_for([True], [True, False]), ids=["ef", ""])
def test_an_optimiser_in_parts_is_saved_once_and_goes_on_in_others(tmp_path: Path, corrected: bool) -> None:
    """Bit by bit after a worker was killed; and other replicas, in parts or not, save the same state again."""
    options = ("--epochs", "2", "--checkpoint-minibatches", "8", *(("--correction", "ef") if corrected else ()))
    parts = (*options, "--shard-optimizer")
    train(tmp_path / "whole", TOY, [3, 1], *parts)
    statuses, _ = launch(tmp_path, replace(TOY, die=(3, 35)), [3, 1], *parts)
    assert statuses[3] == 9
    train(tmp_path, TOY, [3, 1], *parts, "--resume")
    ours, whole = marks(tmp_path / "run"), marks(tmp_path / "whole" / "run")
    assert ours == whole
    assert any(name.startswith("optim.state.one.weight.") for name in ours["tensors"])
    middle = checkpoint.complete_checkpoints(tmp_path / "run")[0]
    begun = ("--resume-from", str(middle), "--max-minibatches", "16")
    source = json.loads(json.dumps(checkpoint.find_checkpoint(middle).as_json()))
    for number, (replicas, more) in enumerate([([1, 2], parts), ([2, 1], options)]):
        train(tmp_path / str(number), TOY, replicas, *more, *begun)
        taken = marks(tmp_path / str(number) / "run")
        assert taken["optimizer"]["state"] == source["optimizer"]["state"]
        if not corrected:  # stages with other delays keep fewer steps
            crc32s = {name: one[2] for name, one in taken["tensors"].items()}
            assert crc32s == {name: one["crc32"] for name, one in source["tensors"].items()}


@pytest.mark.parametrize("replicas", slow_but_for([[1, 2]], [[1], [1, 2], [1, 1, 1]]), ids=str)
def test_goes_on_under_any_plan_in_a_new_run(tmp_path: Path, whole: Path, replicas: list[int]) -> None:
    """In the middle of an epoch; the new run holds what it began from, and then its own."""
    (middle, _) = checkpoint.complete_checkpoints(whole)
    source, run = checkpoint.find_checkpoint(middle), tmp_path / "run"
    assert (source.position.epoch, source.position.minibatch) == (1, 18)
    said = train(tmp_path, TOY, replicas, "--epochs", "2", "--resume-from", str(middle), "--max-minibatches", "18")
    assert f"resumed from {middle}, after epoch 2, minibatch 18" in said
    # With only 18 minibatches in an epoch nothing was left to train: what was taken over was written again as it was.
    ours, theirs = marks(run), json.loads(json.dumps(source.as_json()))
    crc32s = {name: one["crc32"] for name, one in theirs["tensors"].items()}
    assert {name: one[2] for name, one in ours["tensors"].items()} == crc32s
    by_name, expected = (
        {name: group["settings"] for group in one["optimizer"]["groups"] for name in group["names"]}
        for one in (ours, theirs)
    )
    assert by_name == expected
    assert ours["optimizer"]["state"] == theirs["optimizer"]["state"]
    assert (latest(run).seed, latest(run).samples) == (source.seed, source.samples)
    first, second = epochs(run)
    assert (first, second["epoch"], second["loss"]) == (epochs(whole)[0], 2, source.history.loss)
    assert second["test_accuracy"] is not None
    # And it trains on from there.
    train(tmp_path, TOY, replicas, "--epochs", "3", "--resume")
    assert [(epoch, number) for epoch, number, _ in lines(run, sum(replicas[:-1]))] == [(2, n) for n in range(20)]


def test_a_plan_may_change_within_a_run(tmp_path: Path) -> None:
    """And with minibatches of another size some samples are run again: 18 of 2 are seven of 5 and a rest."""
    train(tmp_path, TOY, [2, 1], "--epochs", "1", *EVERY)
    (middle, _) = checkpoint.complete_checkpoints(tmp_path / "run")
    said = train(tmp_path / "other", TOY, [1], "--epochs", "1", "--resume-from", str(middle), minibatch=5)
    assert "note: with minibatches of 5, 1 samples of this epoch are run again" in said
    assert [number for _, number, _ in lines(tmp_path / "other" / "run")] == [7]
    shutil.rmtree(tmp_path / "stages")
    said = train(tmp_path, TOY, [1, 1, 1], "--epochs", "2", "--resume")
    assert "after epoch 1\n" in said
    assert [one["epoch"] for one in epochs(tmp_path / "run")] == [1, 2]


def test_weights_alone_begin_a_new_training_that_saves_and_evaluates_as_often_as_asked(
    tmp_path: Path, whole: Path
) -> None:
    """With its own plan, seed, optimiser and epochs."""
    options = ["--epochs", "5", "--evaluate-every", "2", "--checkpoint-every", "4", "--seed", "5"]
    train(tmp_path, TOY, [1, 1], *options, "--weights", str(whole))
    run = tmp_path / "run"
    assert [one["test_accuracy"] is not None for one in epochs(run)] == [False, True, False, True, True]
    found = map(checkpoint.find_checkpoint, checkpoint.complete_checkpoints(run))
    assert [(one.seed, one.position.epoch) for one in found] == [(5, 3), (5, 4)]
    before, after = model_of(latest(whole)), model_of(latest(run))
    assert torch.equal(before["two.unused"], after["two.unused"])
    assert after["two.calls"] == before["two.calls"] + 5 * 20


def test_refusals_come_before_anything_is_made(tmp_path: Path, whole: Path) -> None:
    other = save(tmp_path / "other", {"model.x": torch.zeros(1)}) / "manifest.json"
    rewrite(other, json.loads(other.read_text().replace("sha256:toy", "sha256:another")))
    training, inference = (
        load_plan(write_plan(tmp_path / mode, stage_contents([1], mode=mode))) for mode in ("training", "inference")
    )
    before, none = sorted(tmp_path.rglob("*")), tmp_path / "none"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (training, {"resume_from": whole, "seed": 3}, "has --seed 0: resume with the same"),
        (training, {"resume": True}, "no complete checkpoint to resume from"),
        (training, {"run_dir": whole}, "already holds a run: add --resume"),
        (training, {"resume_from": none}, "neither a checkpoint nor a run folder with a complete one"),
        (training, {"weights": none}, "neither a checkpoint nor a run folder with a complete one"),
        (training, {"resume_from": whole, "resume": True}, "--resume and --resume-from exclude each other"),
        (training, {"resume_from": whole, "weights": whole}, "--resume-from and --weights exclude each other"),
        (training, {"resume_from": other.parent}, "is of another model, or another version of 'toy'"),
        (inference, {"resume": True}, "cannot be resumed: give --weights in place of --resume"),
        (inference, {"resume_from": whole}, "give --weights in place of --resume-from"),
    ]
    for plan, options, says in cases:
        with pytest.raises(LaunchError, match=says):
            run_start.decide_start(RunOptions(tmp_path / plan.mode, **{"run_dir": tmp_path / "run"} | options), plan)
        assert sorted(tmp_path.rglob("*")) == before


def test_nothing_left_to_do(tmp_path: Path, whole: Path) -> None:
    """A finished run keeps its files; elsewhere nothing is made."""
    run = tmp_path / "copy"
    shutil.copytree(whole, run)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    said = train(tmp_path, TOY, [2, 1], "--run-dir", str(run), "--epochs", "2", "--resume")
    assert said.startswith("nothing left to do: ")
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    plan = load_plan(write_plan(tmp_path / "plan", stage_contents([1])))
    options = RunOptions(tmp_path / "plan", epochs=2, run_dir=tmp_path / "run", resume_from=whole)
    assert run_start.decide_start(options, plan).finished == 2
    assert not (tmp_path / "run").exists()
    assert run_start.decide_start(replace(options, epochs=3), plan).finished is None
    assert (tmp_path / "run").exists()


def test_a_disk_that_is_full_for_one_worker_is_one_line(tmp_path: Path) -> None:
    """The others learn of it; the checkpoint before is whole, and nothing of the new one is left."""
    few = replace(TOY, samples=4)  # so few that the files of metrics stay smaller than the tensors
    train(tmp_path, few, [2, 1], "--epochs", "1")
    before = checkpoint.complete_checkpoints(tmp_path / "run")
    limiter = threading.Thread(target=_limit_file_size, args=(tmp_path / "worker-1.pid", 1500))
    (tmp_path / "worker-1.pid").unlink()
    limiter.start()
    statuses, said = launch(tmp_path, few, [2, 1], "--epochs", "2", "--resume")
    limiter.join()
    assert statuses == [2, 2, 2]
    (line,) = [line for line in said.splitlines() if line.startswith("error")]
    written = tmp_path / "run" / checkpoint.PARTIAL_CHECKPOINT / "tensors-1.safetensors"
    assert line == f"error: writing {written} failed: File too large"
    assert checkpoint.complete_checkpoints(tmp_path / "run") == before
    assert checkpoint.find_checkpoint(before[0]).position == Position(0, 2, 2)
    assert not (tmp_path / "run" / checkpoint.PARTIAL_CHECKPOINT).exists()


def _limit_file_size(process: Path, size: int) -> None:
    """As soon as a worker has told its process id."""
    while not process.exists() or not process.read_text():
        time.sleep(0.001)
    resource.prlimit(int(process.read_text()), resource.RLIMIT_FSIZE, (size, size))


def test_a_run_becomes_a_state_dict(tmp_path: Path, whole: Path) -> None:
    """What replicas and stages wrote together."""
    assert export.main([str(whole), "-o", str(tmp_path / "model.pt")]) == 0
    content, manifest = torch.load(tmp_path / "model.pt", weights_only=True), latest(whole)
    expected = model_of(manifest)
    assert list(content) == [name for state in (*initial(), *initial_buffers()) for name in state]
    assert content.keys() == expected.keys()
    assert {one.file for one in manifest.tensors.values()} == {f"tensors-{rank}.safetensors" for rank in range(3)}
    assert all(torch.equal(value, expected[name]) for name, value in content.items())


def damage(run: Path) -> tuple[Path, Path]:
    """Lose what the worker of the last stage wrote into the last of two checkpoints."""
    before, last = checkpoint.complete_checkpoints(run)
    (path,) = last.glob("tensors-2*.safetensors")
    path.write_bytes(bytes(path.stat().st_size))
    return before, last


def test_a_damaged_checkpoint_is_left_for_the_one_before(tmp_path: Path, whole: Path) -> None:
    """In every stage, and only one says so; the run goes on as from an undamaged one."""
    runs = [tmp_path / "damaged", tmp_path / "undamaged"]
    for run in runs:
        shutil.copytree(whole, run)
    _, last = damage(runs[0])
    statuses, said = launch(tmp_path, TOY, [2, 1], "--epochs", "3", "--resume-from", str(last))
    assert statuses == [2, 2, 2], "one that was named has no other in its place"
    (line,) = said.splitlines()
    assert line.startswith("error: ")
    assert "name an earlier checkpoint, with --resume-from" in line
    said, _ = (train(tmp_path, TOY, [2, 1], "--epochs", "3", *EVERY, "--resume", "--run-dir", str(run)) for run in runs)
    (line,) = [line for line in said.splitlines() if "going back to the checkpoint before it" in line]
    assert str(last) in line
    assert "after epoch 2, minibatch 18" in said
    assert marks(runs[0]) == marks(runs[1])
    assert lines(runs[0], 2) == lines(runs[1], 2)


def test_a_restart_leaves_a_damaged_checkpoint_too(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, store = tmp_path / "copy", HashStore()
    shutil.copytree(whole, copy)
    before, last = checkpoint.complete_checkpoints(copy)
    (last / "manifest.json").write_text("{")
    attempt = Attempt(2, store, store, 0, 1)
    attempt.remember_run(copy)
    plan = load_plan(write_plan(tmp_path / "plan", stage_contents([1])))
    start = run_start.decide_start(RunOptions(tmp_path / "plan", epochs=3), plan, attempt)
    assert (start.run, start.checkpoint) == (copy, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("going back to the checkpoint before it")


def test_training_stops_where_the_loss_is_lost(tmp_path: Path) -> None:
    """At the same minibatch everywhere, and no checkpoint is made of the weights from there on; or it is warned."""
    run = tmp_path / "run"
    statuses, said = launch(tmp_path, Toy(loss="nan-later"), [1, 2], "--epochs", "9", *EVERY)
    assert statuses == [2, 2, 2]
    (line,) = (line for line in said.splitlines() if line.startswith("error"))
    assert line.startswith("error: the loss became non-finite in epoch 2/9, minibatch 1/20, and"), said
    found = checkpoint.complete_checkpoints(run)
    assert str(found[-1]) in line
    assert all(checkpoint.find_checkpoint(folder).history.is_finite for folder in found)
    steps = [map(json.loads, (run / f"metrics/rank-{rank}.jsonl").read_text().splitlines()) for rank in range(3)]
    done = [{(one["epoch"], one["minibatch"]) for one in of_rank} for of_rank in steps]
    assert done[0] == done[1] | done[2]
    said = train(tmp_path / "on", Toy(loss="nan-later"), [1, 1], "--epochs", "2", *EVERY, "--on-nan", "warn")
    assert said.count("warning: the loss became non-finite") == said.count("non-finite") == 1
    found = checkpoint.complete_checkpoints(tmp_path / "on" / "run")
    assert [checkpoint.find_checkpoint(one).history.is_finite for one in found] == [True, True, False, False]
    assert [one["loss"] for one in epochs(tmp_path / "on" / "run")] == [None, None]


def test_positions_in_epochs_of_other_minibatches(tmp_path: Path) -> None:
    for at, count, expected in (
        (Position(2, 6, 20), 20, (2, 6)),
        (Position(2, 20, 20), 20, (2, 20)),
        (Position(2, 20, 20), 5, (2, 5)),
        (Position(2, 6, 20), 5, (2, 1)),
        (Position(2, 19, 20), 5, (2, 4)),
        (Position(0, 0, 20), 20, (0, 0)),
    ):
        results = [{"epoch": epoch + 1} for epoch in range(at.epoch)]
        run = tmp_path / f"{at}, {count}"
        save(run, {"x": torch.zeros(1)}, at, minibatch_samples=2, samples=40, history=History(results))
        found = position_in(latest(run), MinibatchSizes(40, 40 // count, True, True))
        assert (found.epoch, found.minibatch, found.minibatches) == (*expected, count)
        if at.epoch_trained:
            evaluated = structs.replace(latest(run), history=History([*results, {"epoch": at.epoch + 1}]))
            assert position_in(evaluated, MinibatchSizes(40, 2, True, True)) == Position(at.epoch + 1, 0, 20)
        else:
            with pytest.raises(LaunchError, match=r"in the middle of an epoch over 40 samples, .* data has 38"):
                position_in(latest(run), MinibatchSizes(38, 2, True, True))
    assert [segment_end(first, 20, 6) for first in (0, 5, 6, 17, 18, 19)] == [6, 6, 12, 18, 20, 20]
    assert segment_end(3, 20, None) == 20


def test_metrics_are_cut_off_where_training_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "rank-0.jsonl"
    path.parent.mkdir()
    made = [
        json.dumps({"epoch": epoch, "minibatch": number, "pad": "x" * 50}) + "\n"
        for epoch in range(2)
        for number in range(0, 30000, 2)
    ]
    for end, kept in (((1, 7), 15004), ((1, 0), 15000), ((0, 1), 1), ((0, 0), 0), ((5, 0), 30000)):
        path.write_text("".join(made) + '{"epoch": 1, "minib')
        run_folder.reopen_run(tmp_path, *end)
        assert path.read_text() == "".join(made[:kept])
    for text in ("", "\n", "no JSON\n", "no end", "x" * 3_000_000):
        path.write_text(text)
        run_folder.reopen_run(tmp_path, 3, 0)
        assert path.read_text() == ""
