"""Samples and tokens per second, share of the peak, price and hours, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.devices import bundled_model_of
from pipeplan.cost.throughput import RunSize, throughput_of
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.profile_data.layers import Layer, Provenance, SampleFlops, SampleWork
from pipeplan.profile_data.profile import Profile

V100 = Device("V100 16 GB", "cuda", 1 << 34)
WORK = SampleWork((SampleFlops("matmul", "float32", 1e9, 2e9),), tokens_per_sample=128, dataset_size=5000)
PROFILE = Profile(
    (Layer("a", 0.1, 0.2, 0, 0),), (), 10, provenance=Provenance("modelled", "cuda", "V100 SXM2 16 GB"), work=WORK
)
PLAN = Plan((Stage(("a",), (0, 1), 1, 1),))
PRICED = Cluster("c", V100, (Level("server", 2, 1e9), Level("all", 2, 1e9)), server_price=6.0)


def test_every_figure_by_hand() -> None:
    found = throughput_of(PLAN, PROFILE, PRICED, 0.1, RunSize(epochs=4))
    assert (found.samples_per_s, found.tokens_per_s) == (pytest.approx(100), pytest.approx(12_800))
    # Two busy workers reach at most 2 · 15.7e12 FLOP/s.
    assert found.peak_share == pytest.approx(100 * 3e9 / (2 * 15.7e12))
    # Four workers in two servers cost 12 an hour, and a million samples take 10,000 s.
    assert found.price_per_million_samples == pytest.approx(12 / 3600 * 10_000)
    assert (found.epoch_s, found.run_s) == (pytest.approx(50), pytest.approx(200))
    assert found.run_price == pytest.approx(12 / 3600 * 200)
    assert found.lines[1].startswith("an epoch of 5000 samples takes 50 s, price 0.1667; 4 epochs take 3.33 minutes")


def test_inference_counts_the_forward_pass_and_differing_devices_their_own_peaks() -> None:
    forward = throughput_of(replace(PLAN, inference=True), PROFILE, PRICED, 0.1, RunSize())
    assert forward.peak_share == pytest.approx(100 * 1e9 / (2 * 15.7e12))
    assert forward.epoch_s is None  # nobody asked for epochs
    a100 = Cluster("c", Device("A100 80 GB", "cuda", 1 << 34), (Level("server", 2, 1e9),))
    measured = replace(PROFILE, provenance=Provenance("measured", "cuda", "NVIDIA A100-SXM4-80GB"))
    assert throughput_of(PLAN, measured, a100, 0.1, RunSize()).peak_share == pytest.approx(3e11 / (2 * 19.5e12))
    convolved = replace(measured, work=SampleWork((SampleFlops("convolution", "float32", 1e9, 2e9),)))
    assert throughput_of(PLAN, convolved, a100, 0.1, RunSize()).peak_share == pytest.approx(3e11 / (2 * 156e12))


def test_what_is_not_known_is_not_shown() -> None:
    plain = replace(PROFILE, work=SampleWork())
    free = Cluster("c", V100, (Level("server", 2, 1e9),))
    assert throughput_of(PLAN, plain, free, 0.1, RunSize()).lines == []
    # A profile of another device, and a device without a file, have no share of a peak.
    other = replace(PROFILE, provenance=Provenance("measured", "cpu", "Xeon"))
    assert throughput_of(PLAN, other, free, 0.1, RunSize()).peak_share is None
    unknown = Cluster("c", Device("", "cuda", 1 << 34), (Level("server", 2, 1e9),))
    assert throughput_of(PLAN, PROFILE, unknown, 0.1, RunSize()).peak_share is None
    assert bundled_model_of("TITAN V") is None


def test_epochs_need_a_data_set() -> None:
    with pytest.raises(InputError, match="dataset_size"):
        RunSize(epochs=1).check(replace(PROFILE, work=SampleWork()), inference=False)
    RunSize(epochs=1).check(PROFILE, inference=False)


def test_the_work_of_a_sample_is_in_the_file_only_if_it_is_known(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    assert "work" not in replace(PROFILE, work=SampleWork()).to_json()
