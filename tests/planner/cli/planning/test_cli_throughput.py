"""A plan's pace in the units of a training run, from the command line to plan.json and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import Run

from pipeplan.profile_data.layers import Layer, Provenance
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.sample_work import SampleFlops, SampleWork

CLUSTER = """
format = "pipeplan-cluster"
version = 1
name = "paid"
price_per_hour = 7.2
[device]
name = "V100 16 GB"
kind = "cuda"
memory = "16 GiB"
[[level]]
name = "server"
count = 2
bandwidth = "10 GB/s"
"""


@pytest.fixture
def files(run: Run) -> Run:
    work = SampleWork((SampleFlops("matmul", "float32", 1e9, 2e9),), dataset_size=1000)
    origin = Provenance("modelled", "cuda", "V100 SXM2 16 GB")
    Profile((Layer("a", 0.02, 0.02, 0, 0),), (), 10, "a.py:a", "a", provenance=origin, work=work).save("profile.json")
    Path("paid.toml").write_text(CLUSTER)
    return run


def test_rates_prices_and_hours_are_in_the_answer_the_plan_and_the_report(files: Run) -> None:
    options = ("--cluster", "paid.toml", "--epochs", "9", "--tokens-per-sample", "64")
    done = files("solve", *options)
    assert done.code == 0, done.err
    lines = [
        "32000 tokens/s, 4.8% of the peak of V100 SXM2 16 GB (MFU), price per million samples 4.00",
        "an epoch of 1000 samples takes 2 s, price 0.004; 9 epochs take 18 s, price 0.036",
    ]
    assert all(f"\n  {line}\n" in done.out for line in lines)
    plan = json.loads(Path("plan/plan.json").read_text())["throughput"]
    assert (plan["samples_per_s"], plan["run_s"], plan["run_price"]) == pytest.approx((500, 18, 0.036))
    report = json.loads(files("report", "plan", "--json").out)
    assert report["prediction"]["in_units"] == lines


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--epochs", "0"), "--epochs must be at least 1"),
        (("--dataset-size", "-3"), "--dataset-size must be at least 1"),
        (("--tokens-per-sample", "many"), "'many' is not a valid integer"),
        (("--epochs", "2", "--inference"), "--epochs is for training"),
    ],
)
def test_odd_sizes_are_refused_in_one_line(files: Run, options: tuple[str, ...], said: str) -> None:
    done = files("solve", "--cluster", "paid.toml", *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not Path("plan").exists()
