"""The comparison with peers compares the same computation."""

from __future__ import annotations

import json
from pathlib import Path

import peers
import peers_run
import peers_torch
import pytest
import torch
from extents import slow_but_for
from jobs import JOBS, SUBJECTS, pieces

from pipeplan_launch.job.loading import load_job
from pipeplan_launch.tracing.split import build_stage_program
from pipeplan_launch.tracing.trace import trace_job

FEW = 2
"""Samples of a microbatch here."""


@pytest.mark.parametrize("subject", slow_but_for({*SUBJECTS} - {"gpt", "vgg"}, SUBJECTS))
def test_both_sides_have_the_same_stages_and_the_same_first_loss(subject: str, tmp_path: Path) -> None:
    job = load_job(f"{JOBS}:{subject}", peers_torch.SEED)
    samples = peers_torch.loader(job, FEW, peers_torch.SEED)(0)
    traced = trace_job(job, FEW)
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"layers": [{"name": layer.name} for layer in traced.layers]}))
    cuts = SUBJECTS[subject].halves
    theirs = pieces(job.model, cuts)
    (_, last), (_, first) = peers_run.pins(subject, profile, cuts)
    names = [layer.name for layer in traced.layers]
    place = names.index(last)
    assert names[place + 1] == first
    layers = (names[: place + 1], names[place + 1 :])
    ours = [build_stage_program(traced, layers, stage, torch.device("cpu")) for stage in range(2)]
    for piece, program in zip(theirs, ours, strict=True):
        own = {name for name, _ in piece.named_parameters()}
        assert own == set(program.parameters_by_name())

    received = ours[0].call(ours[0].parameters_by_name(), [], samples.inputs, FEW)
    output = ours[1].call(ours[1].parameters_by_name(), received, [], FEW)
    assert job.loss is not None
    expected = job.loss(theirs[1](theirs[0](*samples.inputs)), samples.target)
    assert job.loss(output, samples.target).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_worker_of_a_peer_has_all_stages_once(subject: str) -> None:
    for kind in peers_torch.KINDS.values():
        stages = sorted(stage for rank in range(peers_run.WORKERS) for stage in kind.stages(rank))
        assert stages == list(range(len(getattr(SUBJECTS[subject], kind.cuts)) + 1))


def test_every_row_updates_from_as_many_samples_on_both_sides() -> None:
    for row in peers.ROWS.values():
        for ours in row.ours:
            assert ours.minibatch * ours.group == SUBJECTS[row.subject].batch
            assert ours.accumulate in (1, ours.group)
        for contender in row.theirs:
            kind, _, microbatches = contender.partition(":")
            assert kind in {"ddp", *peers_torch.KINDS}
            assert SUBJECTS[row.subject].batch % int(microbatches) == 0


def test_other_losses_end_the_comparison() -> None:
    row = peers.ROWS["flush-vgg-4"]
    right = peers_run.Measured((0.0, 1.0), (4.0, 3.0), (0.0,))
    wrong = peers_run.Measured((0.0, 1.0), (4.0, 3.1), (0.0,))
    ours, peer = row.ours[0].name, row.theirs[0]
    peers.check_losses(row, {ours: [right], peer: [right]})
    with pytest.raises(RuntimeError, match="other losses"):
        peers.check_losses(row, {ours: [wrong], peer: [right]})


@pytest.mark.slow
def test_a_row_runs_from_profile_to_ratio(tmp_path: Path) -> None:
    settings = peers.Settings(repeats=1, warm=1, updates=1)
    found = peers.measure("flush-gpt-4", peers.ROWS["flush-gpt-4"], settings, tmp_path)
    assert all(run.update_s(settings.warm) > 0 for runs in found.runs.values() for run in runs)
