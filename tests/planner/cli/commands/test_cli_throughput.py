"""The step time of a plan in the units of a training run, from the Python API to plan.json and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

import pipeplan
from pipeplan.profile_data.layers import Layer, Provenance, SampleFlops, SampleWork
from pipeplan.profile_data.profile import Profile

DP = pipeplan.Settings(solver="dp", certify=False)
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


def test_rates_prices_and_hours_are_in_the_plan_and_the_report(files: Run) -> None:
    profile, cluster = pipeplan.read_profile("profile.json"), pipeplan.cluster("paid.toml")
    pipeplan.render(pipeplan.solve(profile, cluster, settings=DP, epochs=9, tokens_per_sample=64))
    plan = json.loads(Path("plan/plan.json").read_text())["throughput"]
    assert (plan["samples_per_s"], plan["run_s"], plan["run_price"]) == pytest.approx((500, 18, 0.036))
    report = json.loads(files("report", "plan", "--json").out)
    assert report["prediction"]["in_units"] == [
        "32000 tokens/s, 4.8% of the peak of V100 SXM2 16 GB (MFU), price per million samples 4.00",
        "an epoch of 1000 samples takes 2 s, price 0.004; 9 epochs take 18 s, price 0.036",
    ]


def test_the_command_line_states_the_rate_and_the_price(files: Run) -> None:
    done = files("solve", "--cluster", "paid.toml", "--solver", "dp")
    assert done.code == 0, done.err
    assert " 500 samples/s" in done.out
    plan = json.loads(Path("plan/plan.json").read_text())["throughput"]
    assert (plan["samples_per_s"], plan["price_per_million_samples"]) == pytest.approx((500, 4))
    assert plan["run_s"] is None


ODD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"epochs": 0}, "epochs must be at least 1"),
    ({"dataset_size": -3}, "dataset-size must be at least 1"),
    ({"tokens_per_sample": 0}, "tokens-per-sample must be at least 1"),
    ({"epochs": 2, "inference": True}, "epochs is for training"),
)


def test_odd_sizes_are_refused_in_one_line(files: Run) -> None:
    profile, cluster = pipeplan.read_profile("profile.json"), pipeplan.cluster("paid.toml")
    for options, said in ODD:
        with pytest.raises(pipeplan.InputError, match=f"^.*{said}.*$"):
            pipeplan.solve(profile, cluster, settings=DP, **options)
