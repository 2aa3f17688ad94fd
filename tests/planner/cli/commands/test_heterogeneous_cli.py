"""From a file of servers that differ to a plan folder that the executor and the simulator read."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run, refused
from runs import chain

from pipeplan.cluster_data.cluster_toml import read_cluster
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.plan_file import read_plan
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.simulation.scenario import read_scenario
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.preflight import workers_to_start

MIXED = """
format = "pipeplan-cluster"
version = 1
name = "mixed"
device = [
  {name = "big", kind = "cpu", memory = "4 GiB"},
  {name = "small", kind = "cpu", memory = "2 GiB", speed = 0.5},
]
[[server]]
device = "small"
devices = 1
price_per_hour = 1
[[server]]
count = 2
device = "big"
devices = 2
bandwidth = "1 GB/s"
card = "2 Gbit/s"
price_per_hour = 2.5
[[level]]
name = "cluster"
bandwidth = "10 Gbit/s"
"""

QUICK = ("--solver", "dp")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster and a profile in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("mixed.toml").write_text(MIXED)
    replace(chain([(0.1, 0.2, 0.0)] * 9), model_name="chain").save(Path("profile.json"))


def test_a_plan_gives_every_worker_what_it_can_do(run: Run) -> None:
    """And its folder is read by the executor, the simulator and a shell."""
    done = run("solve", "--staleness", "any", "--cluster", "mixed.toml", "--stages", "2")
    assert done.code == 0, done.err
    assert "chain on mixed: 3 servers: 1 small + 2 × 2 big." in " ".join(done.out.split())
    document = json.loads(Path("plan/plan.json").read_text())
    # One ninth of the speed is on the first server, and so one layer of nine.
    assert [len(stage["layers"]) for stage in document["plan"]["stages"]] == [1, 8]
    assert document["verdict"]["proven"] is True
    plan = load_plan(Path("plan"))
    assert (plan.server_sizes, plan.world, plan.servers) == ((1, 2, 2), 5, 3)
    scenario = read_scenario(Path("plan"))
    assert [scenario.server_of(worker) for worker in range(5)] == [0, 1, 1, 2, 2]
    started = [workers_to_start(plan, {"NODE_RANK": str(server)}, 0) for server in range(3)]
    assert started == [1, 2, 2], "how many launch.sh starts on each"
    done = run("simulate", "plan", "--trace", "trace.json")
    assert done.code == 0, done.err
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"server 0, predicted", "server 1, predicted", "server 2, predicted"} <= names


def test_servers_are_put_in_the_best_order(run: Run) -> None:
    Path("named.toml").write_text(
        MIXED.replace('[[server]]\ndevice = "small"', '[[server]]\nname = "old"\ndevice = "small"')
    )
    given = ("--cluster", "named.toml", "--max-replicas", "1", "--schedule", "1f1b-stashing", *QUICK)
    best = run("solve", *given, "-o", "best")
    assert best.code == 0, best.err
    problem = read_plan(Path("best"), None)[0]
    listed = solve(replace(problem, cluster=read_cluster(Path("named.toml"))), Settings(solver="dp", simplify=True))
    write_plan(listed, Path("listed"))
    assert json.loads(Path("best/plan.json").read_text())["prediction"]["minibatch_s"] <= listed.objective_s
    assert "3 orders of the servers were tried" in best.err
    assert run("check", "best", "--require-proof").code == 0
    script = Path("listed/launch.sh").read_text()
    assert "NODE_RANK=0: old: 1 x small" in script
    assert "in any order" not in script


def test_a_sweep_says_which_servers_a_row_has(run: Run) -> None:
    given = ("--cluster", "mixed.toml", "--servers", "1,2", "--max-replicas", "1", "--schedule", "1f1b-stashing")
    done = run("sweep", *given, "--csv", "made.csv")
    assert "Point 1: 1 small." in done.out
    assert "Point 2: 2 servers: 1 small + 2 big." in done.out
    rows = list(csv.DictReader(Path("made.csv").read_text().splitlines()))
    assert [row["devices"] for row in rows] == ["1 small", "2 servers: 1 small + 2 big"]


def test_the_first_servers_can_be_had_alone_and_a_file_is_listed_as_it_was_understood(run: Run) -> None:
    done = run("solve", "--cluster", "mixed.toml", "--servers", "2", *QUICK, "--json", "--no-write")
    assert [server["inside"]["count"] for server in json.loads(done.out)["cluster"]["servers"]] == [1, 2]
    Path("named.toml").write_text(MIXED.replace("count = 2", 'count = 2\nname = "both"'))
    assert "one name stands for 2 servers" in refused(run, "solve", "--cluster", "named.toml")
    listed = run("list", "clusters", "mixed.toml").out
    for expected in ("1 × 1 small", "2 × 2 big", "1 / 2 a server at 8 Gbit/s", "3 a cluster at 10 / 2 Gbit/s", "6.00"):
        assert expected in listed
    refused(run, "list", "clusters", "nowhere.toml")
    listed = run("list", "clusters").out
    assert all(name in listed for name in ("A", "B", "C", "local", "25 Gbit/s"))
