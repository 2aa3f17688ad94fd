"""Workers that hold other data or other weights than their peers do not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_workers import Toy, run_plan, stage_contents, write_plan

from pipeplan_launch import load_job
from pipeplan_launch.elastic.consistency_check import Fingerprint, check_agreement, digest
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.runtime.data import data_fingerprint

RANDOM_JOB = """
import random
import numpy
import torch
from pipeplan_launch import Data, Job

OFFSET = random.random() + numpy.random.rand()

def data():
    samples = [(torch.tensor([random.random(), numpy.random.rand()]), int(torch.randint(9, ()))) for _ in range(5)]
    return Data(samples, samples[:2])

def make():
    net = torch.nn.Linear(2, 9)
    net.weight.data += OFFSET + random.random() + numpy.random.rand()
    return Job(net, data=data)
"""


def test_the_same_seed_gives_the_same_job(tmp_path: Path) -> None:
    """Whichever source of random numbers its construction and its data use."""
    (tmp_path / "random_job.py").write_text(RANDOM_JOB)
    one, two, other = (load_job(f"{tmp_path}/random_job.py:make", seed) for seed in (1, 1, 2))
    torch.rand(3)  # what was drawn in between does not matter
    assert digest(one.model.state_dict()) == digest(two.model.state_dict()) != digest(other.model.state_dict())
    assert digest(one.datasets.train) == digest(two.datasets.train) != digest(other.datasets.train)


def test_says_what_differs() -> None:
    """`test_data.py` has samples."""
    samples = [(torch.tensor([float(number)]), number) for number in range(5)]
    marks, fewer = (data_fingerprint("training", samples[:count], 0) for count in (5, 4))
    assert list(marks) == ["the number of training samples", *(f"training sample {n}" for n in (0, 2, 4))]
    check_agreement([Fingerprint(rank, rank, marks, "", job="sha256:a") for rank in range(3)])
    with pytest.raises(LaunchError, match=r"the number of training samples .* \(5 and 4\)"):
        check_agreement([Fingerprint(0, 0, marks), Fingerprint(1, 1, fewer)])
    with pytest.raises(LaunchError, match="initial weights of stage 1 differ between its replicas, ranks 1 and 2"):
        check_agreement([Fingerprint(0, 0, marks, ""), Fingerprint(1, 1, marks, "a"), Fingerprint(2, 1, marks, "b")])
    with pytest.raises(LaunchError, match=r"job's file differs between workers: .* ranks 0 and 1: copy one file"):
        check_agreement([Fingerprint(0, 0, job="sha256:a"), Fingerprint(1, 1, job="sha256:b")])


def test_digests_tell_tensors_apart() -> None:
    values = [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2).double(), torch.tensor(0.0), torch.tensor([]), 0, 0.0]
    values += [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool), {"a": torch.ones(2)}, (1, 2), [1]]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.ones(3, 2).t()) == digest(torch.ones(2, 3))


def test_a_run_on_different_data_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([2, 1], idle=1))
    ended = run_plan(tmp_path, ["--run-dir", str(tmp_path / "run")], Toy(other_data_rank=3), 4)
    assert ended.statuses == [2, 2, 2, 2]
    (line,) = ended.err.splitlines()
    assert "the data differs between workers: the number of training samples is not the same at ranks 1 and 3" in line
