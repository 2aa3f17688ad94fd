"""Runs of nccl-tests as a level: what is fitted is what the made-up links have, and files are left as they were."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import foreign
import pytest
from commandline import Run

from pipeplan.cluster_data import cluster_toml
from pipeplan.cost.formulas import ring_allreduce_time
from pipeplan.errors import InputError
from pipeplan.importers import nccl_tests
from pipeplan.importers.nccl_tests import level_from_runs
from pipeplan.util.units import parse_rate

SIZES = [1 << power for power in range(10, 31, 2)]
CLUSTER = """\
# Our lab.
format = "pipeplan-cluster"
version = 1
name = "lab"

[device]
name = "H100"
kind = "cuda"
memory = "78 GiB"

[[level]]
name = "server"
count = 8
bandwidth = "450 GB/s"  # NVLink

# Between the servers
[[level]]
name = "cluster"
count = 2
bandwidth = "50 GB/s"
latency = "5 us"
sendrecv_efficiency = 0.9
# measured last year
"""


@pytest.mark.parametrize(("ranks", "bandwidth", "step_s"), [(2, 20e9, 3e-6), (8, 400e9, 2e-6), (16, 45e9, 1e-7)])
def test_what_is_fitted_is_what_was_there(tmp_path: Path, ranks: int, bandwidth: float, step_s: float) -> None:
    document = foreign.nccl_tests(ranks, bandwidth, step_s, SIZES)
    run = nccl_tests.read_nccl_tests(foreign.written(tmp_path / "a.json", document))
    assert (run.ranks, run.hosts, run.device) == (ranks, 1, "NVIDIA H100 80GB HBM3")
    found = nccl_tests.fit_nccl_tests(run)
    assert found.bandwidth == pytest.approx(bandwidth, rel=5e-3)
    assert found.latency_s == pytest.approx(step_s, rel=1e-3, abs=1e-10)
    assert found.worst < 5e-3
    row = document["results"][5]
    again = ring_allreduce_time(ranks, row["size"], found.bandwidth, found.latency_s)
    assert again == pytest.approx(row["in_place"]["time"] / 1e6, rel=1e-3), (
        "what the planner will charge is what was measured"
    )


def test_ranks_come_from_the_rates_where_devices_are_not_all_listed(tmp_path: Path) -> None:
    document = foreign.nccl_tests(8, 400e9, 2e-6, SIZES)
    document["config"]["devices"] = document["config"]["devices"][:1]
    assert nccl_tests.read_nccl_tests(foreign.written(tmp_path / "a.json", document)).ranks == 8


def test_messages_and_all_reduces_make_two_efficiencies(tmp_path: Path) -> None:
    reduce = foreign.nccl_tests(16, 40e9, 2e-6, SIZES, hosts=2)
    send = foreign.nccl_tests(16, 48e9, 9e-6, SIZES, operation="sendrecv", hosts=2)
    runs = [
        nccl_tests.read_nccl_tests(foreign.written(tmp_path / f"{n}.json", one)) for n, one in enumerate((reduce, send))
    ]
    found = level_from_runs(runs, 50e9)
    assert (found.bandwidth, found.servers, found.spans) == (50e9, True, 2)
    assert (found.allreduce_efficiency, found.sendrecv_efficiency) == pytest.approx((0.8, 0.96), rel=1e-3)
    assert found.latency_s == pytest.approx(9e-6, rel=1e-3), "one latency for both: the longer"
    alone = level_from_runs(runs[:1], None)
    assert (alone.bandwidth, alone.allreduce_efficiency) == (pytest.approx(40e9, rel=1e-3), 1.0)
    assert alone.sendrecv_efficiency is None
    for wrong in ([], runs[1:], [runs[0], runs[0]]):
        with pytest.raises(InputError, match="one run of all_reduce_perf"):
            level_from_runs(wrong, None)


UNUSABLE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"results": []}, "no sizes above 0"),
    ({"results": [{"size": 8, "out_of_place": None}]}, "neither in_place nor out_of_place"),
    ({"results": [{"size": 8, "in_place": {"time": 1.0, "nwrong": 3.0}}]}, "3 values came out wrong"),
    ({"results": [{"size": 8, "in_place": {"cpu_time": 1.0}}]}, "run it without -C"),
    ({"results": [{"size": 8, "in_place": {"time": 0.0}}]}, "must be above 0"),
    ({"results": [{"size": 8, "in_place": {"time": "nan"}}]}, "time: expected a number"),
    ({"args": ["./run.sh"]}, "give --operation"),
    ({"args": ["/opt/all_gather_perf"]}, "a run of all_gather_perf"),
    ({"config": {}, "results": [{"size": 8, "in_place": {"time": 1.0}}]}, "1 rank moves no data"),
)


def test_a_run_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    for change, complaint in UNUSABLE:
        document = foreign.nccl_tests(8, 400e9, 2e-6, SIZES) | change
        with pytest.raises(InputError, match=complaint):
            nccl_tests.read_nccl_tests(foreign.written(tmp_path / "a.json", document))


def test_one_size_tells_a_bandwidth_and_small_ones_tell_none(tmp_path: Path) -> None:
    one = foreign.nccl_tests(4, 100e9, 0.0, [1 << 30])
    found = nccl_tests.fit_nccl_tests(nccl_tests.read_nccl_tests(foreign.written(tmp_path / "a.json", one)))
    assert (found.bandwidth, found.latency_s) == (pytest.approx(100e9), 0.0)
    small = foreign.nccl_tests(8, 400e9, 2e-6, [8, 16, 32])
    with pytest.raises(InputError, match="too small to tell a bandwidth"):
        nccl_tests.fit_nccl_tests(nccl_tests.read_nccl_tests(foreign.written(tmp_path / "b.json", small)))


def test_a_level_goes_into_a_cluster_file_and_all_else_stays(run: Run) -> None:
    Path("lab.toml").write_text(CLUSTER)
    foreign.written(Path("a.json"), foreign.nccl_tests(16, 40e9, 2e-6, SIZES, hosts=2))
    done = run("import", "a.json", "--into", "lab.toml", "-o", "new.toml")
    assert done.code == 0, done.err
    assert Path("lab.toml").read_text() == CLUSTER
    new = Path("new.toml").read_text()
    gone = [line for line in CLUSTER.splitlines() if line not in new.splitlines()]
    assert gone == ['latency = "5 us"'], "all other lines are there as they were"
    level = cluster_toml.load_cluster("new.toml").levels[1]
    assert (level.name, level.bandwidth, level.sendrecv_efficiency) == ("cluster", 50e9, 0.9)
    assert (level.allreduce_efficiency, level.latency_s) == pytest.approx((0.8, 2e-6), rel=1e-3)
    assert level.source == "nccl-tests, a.json, 16 × NVIDIA H100 80GB HBM3 on 2 hosts"
    assert cluster_toml.load_cluster("new.toml").levels[0] == cluster_toml.load_cluster("lab.toml").levels[0]
    assert "exists" in run("import", "a.json", "--into", "lab.toml", "-o", "lab.toml").err
    inner = run("import", "a.json", "--into", "lab.toml", "--level", "server", "-o", "lab.toml", "--force")
    assert inner.code == 0
    assert cluster_toml.load_cluster("lab.toml").levels[0].allreduce_efficiency == pytest.approx(40 / 450, abs=1e-4)


def test_links_of_one_host_are_those_inside_a_server(run: Run) -> None:
    Path("lab.toml").write_text(CLUSTER)
    foreign.written(Path("a.json"), foreign.nccl_tests(8, 360e9, 2e-6, SIZES))
    done = run("import", "a.json", "--into", "lab.toml", "-o", "new.toml")
    assert "level server at 3600 Gbit/s, all-reduce reaches 80%" in done.out
    assert "Messages stay at 3600 Gbit/s" in done.out
    send = foreign.nccl_tests(8, 405e9, 2e-6, SIZES, operation="sendrecv")
    foreign.written(Path("b.json"), send)
    assert "Messages" not in run("import", "a.json", "b.json", "--into", "lab.toml", "-o", "both.toml").out
    level = cluster_toml.load_cluster("both.toml").levels[0]
    assert (level.allreduce_efficiency, level.sendrecv_efficiency) == pytest.approx((0.8, 0.9), rel=1e-3)


def test_links_faster_than_stated_raise_the_bandwidth_and_leave_messages_alone(run: Run) -> None:
    Path("lab.toml").write_text(CLUSTER)
    foreign.written(Path("a.json"), foreign.nccl_tests(16, 100e9, 0.0, SIZES, hosts=2))
    assert run("import", "a.json", "--into", "lab.toml", "-o", "new.toml").code == 0
    level = cluster_toml.load_cluster("new.toml").levels[1]
    assert (level.bandwidth, level.allreduce_efficiency) == (pytest.approx(100e9, rel=5e-3), 1.0)
    assert level.bandwidth * level.sendrecv_efficiency == pytest.approx(50e9 * 0.9, rel=5e-3)


def test_without_a_cluster_file_the_level_is_printed(run: Run) -> None:
    foreign.written(Path("a.json"), foreign.nccl_tests(8, 400e9, 2e-6, SIZES))
    done = run("import", "a.json")
    assert done.code == 0, done.err
    level = tomllib.loads(done.out)["level"][0]
    assert (level["name"], level["count"]) == ("server", 8)
    assert parse_rate(level["bandwidth"], "") == pytest.approx(400e9, rel=1e-3)
    assert "off by 0% (median)" in done.err
    for wrong in (["-o", "x.toml"], ["--level", "server"], ["--microbatch", "4"], ["--into", "lab.toml"]):
        refused = run("import", "a.json", *wrong)
        assert (refused.code, refused.err.count("\n")) == (2, 1), wrong
    Path("lab.toml").write_text(CLUSTER.replace("[[level]]", "[[levels]]"))
    assert run("import", "a.json", "--into", "lab.toml", "-o", "x.toml").code == 2
    Path("lab.toml").write_text(CLUSTER)
    assert "did you mean" in run("import", "a.json", "--into", "lab.toml", "--level", "clister", "-o", "x.toml").err
    assert not Path("x.toml").exists()
