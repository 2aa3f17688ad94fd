"""The data-parallel engine by real workers, beside one plain PyTorch process that has all minibatches of an update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from data_parallel_jobs import SLEEP_S
from data_parallel_runs import Case, assert_equal_to_one_process, reference
from feature_workers import trained
from launching import curve

from pipeplan_launch import load_job
from pipeplan_launch.elastic import restart_state
from pipeplan_launch.tracing.trace import trace_job


@pytest.mark.parametrize(
    "case",
    [
        Case("valid_targets", "zero1", 3, 4),
        Case("valid_targets", "fsdp", 2, 4, recompute=True),
        Case("normalised", "hsdp", 4, 8, servers=2),
        Case("hooked", "ddp", 2, 2),
        Case("normalised", "ddp", 3, 7, shares=(1, 4, 2)),
    ],
    ids=lambda case: f"{case.mode}-{case.replicas}-{case.job}{'-shares' * bool(case.shares)}",
)
def test_training_is_that_of_one_process(tmp_path: Path, case: Case) -> None:
    """13 minibatches an epoch: in the last update some replicas have none. 4 test minibatches, or 3 rounds of two."""
    assert_equal_to_one_process(case, case.train(tmp_path, "--epochs", "2"), 2)


@pytest.mark.parametrize(("mode", "shares"), [("fsdp", ()), ("ddp", (1, 3))])
def test_training_goes_on_as_if_no_worker_had_been_lost(tmp_path: Path, mode: str, shares: tuple[int, ...]) -> None:
    """Bit by bit: after a death before the first checkpoint, in the middle of an epoch, and in an evaluation."""
    case = Case("mortal", mode, 2, 4, shares=shares)
    options = ["--epochs", "2", "--checkpoint-minibatches", "8", "--log-every", "0"]
    whole = case.train(tmp_path / "whole", *options)
    folder, deaths = case.write(tmp_path / "broken"), ["1:2", "0:8", "1:5" if shares else "1:8", ""]
    (folder / "launcher").mkdir()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, dies in enumerate(deaths):
        variables = {
            restart_state.VARIABLE: str(folder / "launcher"),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "DIES": " ".join(deaths),
        }
        ended = case.start(folder, *options, store=store, name=f"attempt-{attempt}", **variables)
        lost = int(dies[0]) if dies else None
        assert ended.statuses == [0 if lost is None else 9 if rank == lost else 3 for rank in range(2)], ended.err
    assert curve(folder / "run") == curve(whole)
    expected, found = trained(whole), trained(folder / "run")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_belongs_to_no_engine(tmp_path: Path) -> None:
    """Epochs under ZeRO-1, FSDP, the traced stage, HSDP and DDP, each from the last checkpoint of the one before."""
    job = load_job(reference("all_used"), 0)
    traced = trace_job(job, job.minibatch)
    plan = {
        "layers": [layer.name for layer in traced.layers],
        "model": {"ref": reference("all_used"), "graph_hash": traced.graph_hash},
    }
    modes = [("zero1", 2, 1), ("fsdp", 3, 1), ("", 1, 1), ("hsdp", 4, 2), ("ddp", 2, 1)]
    cases = [Case("all_used", mode, replicas, 4, servers) for mode, replicas, servers in modes]
    start: tuple[str, ...] = ()
    for epochs, case in enumerate(cases, 1):
        folder = tmp_path / (case.mode or "traced")
        run = case.train(folder, "--epochs", str(epochs), "--no-self-check", *start, **plan)
        start = "--resume-from", str(run)
    assert_equal_to_one_process(cases[-1], run, len(cases), but=("loss.mean",))  # a mean of as many as were replicas


def test_the_wait_for_the_exchange_is_no_part_of_the_backward_pass(tmp_path: Path) -> None:
    """A replica whose gradients are there early waits for the others' in the column of the exchange."""
    run = Case("unequal_speeds", "ddp", 2, 2).train(tmp_path, "--epochs", "1", "--no-self-check")
    steps = [json.loads(line) for path in sorted((run / "metrics").iterdir()) for line in path.open()]
    late = {rank: [step for step in steps if step["rank"] == rank] for rank in (0, 1)}
    slow, quick = (sum(step["backward_s"] for step in late[rank]) for rank in (1, 0))
    assert slow > SLEEP_S * len(late[1])
    assert quick < slow / 2
    assert sum(step["sync_s"] for step in late[0]) > slow / 2
