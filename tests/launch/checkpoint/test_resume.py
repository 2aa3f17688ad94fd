"""Training goes on where a checkpoint is: in the middle of an epoch, before an evaluation, under another plan."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extents import slow_but_for
from saved import marks, model_of, rewrite, save
from torch.distributed import HashStore  # type: ignore[attr-defined]
from toy_jobs import NAN_FROM
from toy_workers import Toy, initial, initial_buffers, run_plan, stage_contents, write_plan

from pipeplan_launch import export
from pipeplan_launch.checkpoint import checkpoint
from pipeplan_launch.checkpoint.manifest import History, Position, read_manifest
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
    write_plan(folder, stage_contents(replicas, **plan))
    chosen = () if "--run-dir" in arguments else ("--run-dir", str(folder / "run"))
    ended = run_plan(folder, [*chosen, *arguments], toy, sum(replicas))
    return ended.statuses, ended.err


def train(folder: Path, toy: Toy, replicas: Sequence[int], *arguments: str, **plan: Any) -> str:
    statuses, said = launch(folder, toy, replicas, *arguments, **plan)
    assert statuses == [0] * sum(replicas), said
    return said


def epochs(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "summary.json").read_text())["epochs"]
    return found


def steps(run: Path, ranks: Iterable[int]) -> list[dict[str, Any]]:
    """The metrics of these ranks."""
    return [
        json.loads(line) for rank in ranks for line in (run / f"metrics/rank-{rank}.jsonl").read_text().splitlines()
    ]


def lines(run: Path, first_rank: int) -> list[tuple[int, int, float]]:
    """(epoch, minibatch, loss) in the metrics of the last stage, whose ranks begin with this one, sorted."""
    found = []
    for path in (run / "metrics").glob("rank-*.jsonl"):
        if int(path.stem.partition("-")[2]) >= first_rank:
            found += [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((line["epoch"], line["minibatch"], line["loss"]) for line in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, TOY, [2, 1], "--epochs", "2", *EVERY)
    return folder / "run"


@pytest.mark.parametrize("calls", [13, *(pytest.param(calls, marks=pytest.mark.slow) for calls in (19, 31))])
def test_equals_a_run_that_nothing_interrupted(tmp_path: Path, whole: Path, calls: int) -> None:
    """Bit by bit, from any checkpoint: a worker is killed at a forward pass, of the evaluation too.

    Rank 1 has 10 forward passes in an epoch's training, and 6 in its evaluation.
    """
    statuses, _ = launch(tmp_path, replace(TOY, die=(1, calls)), [2, 1], "--epochs", "2", *EVERY)
    assert statuses[1] == 9
    found = checkpoint.latest_checkpoint(tmp_path / "run")
    passes, evaluated = divmod(calls, 16)
    done = 20 if evaluated >= 10 else 6 * (2 * evaluated // 6)
    expected = (passes, done) if done else (passes - 1, 20)
    assert expected == ((found.position.epoch, found.position.minibatch) if found else (-1, 20))
    if found is None:
        return
    said = train(tmp_path, TOY, [2, 1], "--epochs", "2", *EVERY, "--resume")
    assert f"resumed from {found.folder}, after {found.position}" in said
    assert marks(tmp_path / "run") == marks(whole)
    assert epochs(tmp_path / "run") == epochs(whole)
    assert lines(tmp_path / "run", 2) == lines(whole, 2), "every minibatch once, with the same loss"


@pytest.mark.parametrize(
    ("schedule", "accumulate"),
    [
        ("2bw", 4),
        pytest.param("vertical-sync", None, marks=pytest.mark.slow),
        pytest.param("gpipe", 4, marks=pytest.mark.slow),
        pytest.param("1f1b-flush", 4, marks=pytest.mark.slow),
    ],
)
def test_equals_it_under_every_schedule(tmp_path: Path, schedule: str, accumulate: int | None) -> None:
    plan = {"schedule": schedule, "accumulate": accumulate}
    arguments = ("--epochs", "2", "--checkpoint-minibatches", "8")
    train(tmp_path / "whole", TOY, [2, 1], *arguments, **plan)
    statuses, _ = launch(tmp_path, replace(TOY, die=(2, 35)), [2, 1], *arguments, **plan)
    assert statuses[2] == 9
    assert "after epoch 1" in train(tmp_path, TOY, [2, 1], *arguments, "--resume", **plan)
    assert marks(tmp_path / "run") == marks(tmp_path / "whole" / "run")


@pytest.mark.slow  # The default suite has corrected updates below, with the optimiser in parts.
@pytest.mark.parametrize(("schedule", "replicas"), [("1f1b-stashing", [2, 1]), ("2bw", [1, 1, 1])])
def test_corrected_updates_go_on_as_if_nothing_had_happened(tmp_path: Path, schedule: str, replicas: list[int]) -> None:
    """Also in the middle of an epoch, the last steps being in the checkpoint; and under a plan with other delays."""
    plan = {"schedule": schedule, "accumulate": 4 if schedule == "2bw" else None}
    arguments = ("--epochs", "2", "--checkpoint-minibatches", "8", "--correction", "ef")
    said = train(tmp_path / "whole", TOY, replicas, *arguments, **plan)
    assert "note: updates are corrected for old gradients" in said
    statuses, _ = launch(tmp_path, replace(TOY, die=(2, 35)), replicas, *arguments, **plan)
    assert statuses[2] == 9
    train(tmp_path, TOY, replicas, *arguments, "--resume", **plan)
    ours = marks(tmp_path / "run")
    assert ours == marks(tmp_path / "whole" / "run")
    assert any(name.startswith("correction.one.weight.") for name in ours["tensors"])
    middle = checkpoint.complete_checkpoints(tmp_path / "run")[0]
    train(tmp_path / "other", TOY, [1, 2], "--resume-from", str(middle), "--correction", "ef", "--epochs", "2")


@pytest.mark.parametrize("corrected", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["ef", ""])
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


def test_the_loss_of_an_epoch_is_of_all_of_it(whole: Path) -> None:
    losses = [loss for epoch, _, loss in lines(whole, 2) if epoch == 0]
    assert len(losses) == 20
    assert epochs(whole)[0]["loss"] == pytest.approx(sum(losses) / 20, rel=1e-6)


@pytest.mark.parametrize("replicas", slow_but_for([[1, 2]], [[1], [1, 2], [1, 1, 1]]), ids=str)
def test_goes_on_under_any_plan_in_a_new_run(tmp_path: Path, whole: Path, replicas: list[int]) -> None:
    """In the middle of an epoch; the new run holds what it began from, and then its own."""
    (middle, _) = checkpoint.complete_checkpoints(whole)
    source = checkpoint.find_checkpoint(middle)
    assert (source.position.epoch, source.position.minibatch) == (1, 18)
    said = train(tmp_path, TOY, replicas, "--epochs", "2", "--resume-from", str(middle), "--max-minibatches", "18")
    run = tmp_path / "run"
    assert f"resumed from {middle}, after epoch 2, minibatch 18" in said
    manifest = checkpoint.latest_checkpoint(run)
    assert manifest is not None
    # With only 18 minibatches in an epoch nothing was left to train: what was taken over was written again as it was.
    ours, theirs = marks(run), json.loads(json.dumps(source.as_json()))
    assert {name: one[2] for name, one in ours["tensors"].items()} == {
        name: one["crc32"] for name, one in theirs["tensors"].items()
    }
    by_name = {name: group["settings"] for group in ours["optimizer"]["groups"] for name in group["names"]}
    assert by_name == {name: group["settings"] for group in theirs["optimizer"]["groups"] for name in group["names"]}
    assert ours["optimizer"]["state"] == theirs["optimizer"]["state"]
    assert (manifest.seed, manifest.samples) == (source.seed, source.samples)
    assert [one["epoch"] for one in epochs(run)] == [1, 2]
    assert epochs(run)[0] == epochs(whole)[0]
    assert epochs(run)[1]["loss"] == source.history.loss
    assert epochs(run)[1]["test_accuracy"] is not None
    # And it trains on from there.
    said = train(tmp_path, TOY, replicas, "--epochs", "3", "--resume")
    assert [(epoch, number) for epoch, number, _ in lines(run, sum(replicas[:-1]))] == [(2, n) for n in range(20)]


def test_a_plan_may_change_within_a_run(tmp_path: Path) -> None:
    train(tmp_path, TOY, [2, 1], "--epochs", "1")
    shutil.rmtree(tmp_path / "stages")
    said = train(tmp_path, TOY, [1, 1, 1], "--epochs", "2", "--resume")
    assert "after epoch 1\n" in said
    assert [one["epoch"] for one in epochs(tmp_path / "run")] == [1, 2]


def test_minibatches_of_another_size(tmp_path: Path) -> None:
    """12 samples are done, which is two minibatches of 5 and a rest."""
    train(tmp_path, TOY, [1], "--epochs", "1", *EVERY)
    (middle, _) = checkpoint.complete_checkpoints(tmp_path / "run")
    assert checkpoint.find_checkpoint(middle).position.minibatch == 18
    said = train(tmp_path / "other", TOY, [1], "--epochs", "1", "--resume-from", str(middle), minibatch=5)
    assert "note: with minibatches of 5, 1 samples of this epoch are run again" in said
    assert [number for _, number, _ in lines(tmp_path / "other" / "run", 0)] == [7]


def test_evaluations_as_often_as_asked(tmp_path: Path) -> None:
    train(tmp_path, TOY, [1, 1], "--epochs", "5", "--evaluate-every", "2", "--checkpoint-every", "4")
    assert [one["test_accuracy"] is not None for one in epochs(tmp_path / "run")] == [False, True, False, True, True]
    found = [
        checkpoint.find_checkpoint(path).position.epoch for path in checkpoint.complete_checkpoints(tmp_path / "run")
    ]
    assert found == [3, 4]


def test_a_request_to_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    """All workers end at the same minibatch, with status 0, and the run goes on from there."""
    run = tmp_path / "run"
    toy = Toy(samples=1000)
    stopper = threading.Thread(target=_stop_when_under_way, args=(tmp_path, run / "metrics" / "rank-2.jsonl"))
    stopper.start()
    said = train(tmp_path, toy, [2, 1], "--epochs", "1000")
    stopper.join()
    found = checkpoint.latest_checkpoint(run)
    assert found is not None
    assert f"stopped after {found.position}: --resume goes on from there" in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped"] == {"epoch": found.position.epoch, "minibatch": found.position.minibatch}
    last = found.position.epoch + 1
    said = train(tmp_path, toy, [2, 1], "--epochs", str(last), "--resume")
    assert [(epoch, number) for epoch, number, _ in lines(run, 2)] == [
        (epoch, number) for epoch in range(last) for number in range(500)
    ]
    assert len(epochs(run)) == last


def _stop_when_under_way(folder: Path, metrics: Path) -> None:
    while not metrics.exists() or not metrics.stat().st_size:
        time.sleep(0.01)
    for path in folder.glob("worker-*.pid"):
        os.kill(int(path.read_text()), signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume_from": "RUN", "seed": 3}, "has --seed 0: resume with the same"),
        ({"resume_from": "NONE"}, "neither a checkpoint nor a run folder with a complete one"),
        ({"weights": "NONE"}, "neither a checkpoint nor a run folder with a complete one"),
        ({"resume_from": "RUN", "resume": True}, "--resume and --resume-from exclude each other"),
        ({"resume_from": "RUN", "weights": "RUN"}, "--resume-from and --weights exclude each other"),
        ({"resume_from": "OTHER"}, "is of another model, or another version of 'toy'"),
        ({"resume": True, "mode": "inference"}, "cannot be resumed: give --weights in place of --resume"),
        ({"resume_from": "RUN", "mode": "inference"}, "give --weights in place of --resume-from"),
    ],
    ids=str,
)
def test_refusals_come_before_anything_is_made(
    tmp_path: Path, whole: Path, options: dict[str, Any], message: str
) -> None:
    other = save(tmp_path / "other", {"model.x": torch.zeros(1)}) / "manifest.json"
    rewrite(other, json.loads(other.read_text().replace("sha256:toy", "sha256:another")))
    paths = {"RUN": whole, "NONE": tmp_path / "none", "OTHER": other.parent}
    given = {name: paths.get(value, value) if isinstance(value, str) else value for name, value in options.items()}
    plan = load_plan(write_plan(tmp_path / "plan", stage_contents([1], mode=given.pop("mode", "training"))))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LaunchError, match=message):
        run_start.decide_start(RunOptions(tmp_path / "plan", run_dir=tmp_path / "run", **given), plan)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_left_to_do_elsewhere(tmp_path: Path, whole: Path) -> None:
    plan = load_plan(write_plan(tmp_path / "plan", stage_contents([1])))
    options = RunOptions(tmp_path / "plan", epochs=2, run_dir=tmp_path / "run", resume_from=whole)
    assert run_start.decide_start(options, plan).finished == 2
    assert not (tmp_path / "run").exists()
    assert run_start.decide_start(replace(options, epochs=3), plan).finished is None
    assert (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """What should become the folder of checkpoints is a file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / checkpoint.PARTIAL_CHECKPOINT).write_text("in the way")
    statuses, said = launch(tmp_path, TOY, [2, 1], "--epochs", "1")
    assert statuses == [2, 2, 2]
    (line,) = [line for line in said.splitlines() if line.startswith("error")]
    assert f"making {tmp_path}/run/{checkpoint.PARTIAL_CHECKPOINT} failed" in line


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
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    manifest = checkpoint.latest_checkpoint(whole)
    assert manifest is not None
    expected = model_of(manifest)
    assert list(content) == [name for state in (*initial(), *initial_buffers()) for name in state]
    assert content.keys() == expected.keys()
    assert {one.file for one in manifest.tensors.values()} == {f"tensors-{rank}.safetensors" for rank in range(3)}
    assert all(torch.equal(value, expected[name]) for name, value in content.items())


def _damage(folder: Path) -> None:
    """Lose what the worker of the last stage wrote."""
    (path,) = folder.glob("tensors-2*.safetensors")
    path.write_bytes(bytes(path.stat().st_size))


def test_a_damaged_checkpoint_is_left_for_the_one_before(tmp_path: Path, whole: Path) -> None:
    """In every stage, and only one says so; the run goes on as from an undamaged one."""
    runs = [tmp_path / "damaged", tmp_path / "undamaged"]
    for run in runs:
        shutil.copytree(whole, run)
    last = checkpoint.complete_checkpoints(runs[0])[-1]
    _damage(last)
    said = [train(tmp_path, TOY, [2, 1], "--epochs", "3", *EVERY, "--resume", "--run-dir", str(run)) for run in runs]
    assert said[0].count("going back to the checkpoint before it") == 1
    assert str(last) in next(line for line in said[0].splitlines() if "going back" in line)
    assert "after epoch 2, minibatch 18" in said[0]
    assert marks(runs[0]) == marks(runs[1])
    assert lines(runs[0], 2) == lines(runs[1], 2)


def test_a_checkpoint_that_was_named_has_no_other_in_its_place(tmp_path: Path, whole: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    last = checkpoint.complete_checkpoints(copy)[-1]
    _damage(last)
    statuses, said = launch(tmp_path, TOY, [2, 1], "--epochs", "3", "--resume-from", str(last))
    assert statuses == [2, 2, 2]
    (line,) = said.splitlines()
    assert line.startswith("error: ")
    assert "name an earlier checkpoint, with --resume-from" in line


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


@pytest.mark.parametrize(("replicas", "epoch", "minibatch"), [([1, 2], 2, 1), ([1, 1], 1, NAN_FROM)])
def test_training_stops_where_the_loss_is_lost(tmp_path: Path, replicas: list[int], epoch: int, minibatch: int) -> None:
    """At the same minibatch everywhere, and no checkpoint is made of the weights from there on."""
    statuses, said = launch(tmp_path, Toy(loss="nan-later"), replicas, "--epochs", "9", *EVERY)
    assert statuses == [2] * sum(replicas)
    (line,) = (line for line in said.splitlines() if line.startswith("error"))
    assert line.startswith(f"error: the loss became non-finite in epoch {epoch}/9, minibatch {minibatch}/20, and"), said
    found = checkpoint.complete_checkpoints(tmp_path / "run")
    assert found, "checkpoints from before"
    assert str(found[-1]) in line
    assert all(read_manifest(folder).history.is_finite for folder in found)
    done = {(line["epoch"], line["minibatch"]) for line in steps(tmp_path / "run", range(1))}
    assert done == {(line["epoch"], line["minibatch"]) for line in steps(tmp_path / "run", range(1, sum(replicas)))}


def test_who_trains_on_keeps_the_checkpoints_from_before(tmp_path: Path) -> None:
    said = train(tmp_path, Toy(loss="nan-later"), [1, 1], "--epochs", "2", *EVERY, "--on-nan", "warn")
    assert said.count("warning: the loss became non-finite") == 1
    found = [read_manifest(folder).history.is_finite for folder in checkpoint.complete_checkpoints(tmp_path / "run")]
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("at", "count", "expected"),
    [
        (Position(2, 6, 20), 20, (2, 6)),
        (Position(2, 20, 20), 20, (2, 20)),
        (Position(2, 20, 20), 5, (2, 5)),
        (Position(2, 6, 20), 5, (2, 1)),
        (Position(2, 19, 20), 5, (2, 4)),
        (Position(0, 0, 20), 20, (0, 0)),
    ],
    ids=str,
)
def test_positions_in_epochs_of_other_minibatches(
    tmp_path: Path, at: Position, count: int, expected: tuple[int, int]
) -> None:
    results = [{"epoch": epoch + 1} for epoch in range(at.epoch)]
    save(tmp_path, {"x": torch.zeros(1)}, at, minibatch_samples=2, samples=40, history=History(results))
    manifest = checkpoint.latest_checkpoint(tmp_path)
    assert manifest is not None
    found = position_in(manifest, MinibatchSizes(40, 40 // count, True, True))
    assert (found.epoch, found.minibatch, found.minibatches) == (*expected, count)
    if at.epoch_trained:
        evaluated = replace(manifest, history=History([*results, {"epoch": at.epoch + 1}]))
        assert position_in(evaluated, MinibatchSizes(40, 2, True, True)) == Position(at.epoch + 1, 0, 20)
    else:
        with pytest.raises(LaunchError, match=r"in the middle of an epoch over 40 samples, .* data has 38"):
            position_in(manifest, MinibatchSizes(38, 2, True, True))


def test_segments_end_at_multiples() -> None:
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


def test_weights_alone_go_to_any_plan(tmp_path: Path, whole: Path) -> None:
    """A new training from them: its own seed, optimiser and epochs."""
    train(tmp_path, TOY, [1, 1], "--epochs", "1", "--seed", "5", "--weights", str(whole))
    manifest, source = checkpoint.latest_checkpoint(tmp_path / "run"), checkpoint.latest_checkpoint(whole)
    assert manifest is not None
    assert source is not None
    assert (manifest.seed, manifest.position.epoch) == (5, 0)
    before, after = model_of(source), model_of(manifest)
    assert torch.equal(before["two.unused"], after["two.unused"])
    assert after["two.calls"] == before["two.calls"] + 20
