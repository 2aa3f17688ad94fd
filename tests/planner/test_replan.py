"""After a loss: what is left of a cluster, the plan for it, and how training goes on."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Ran, Run
from instances import drawn, random_instance, unequal_instance

from pipeplan import cluster_file
from pipeplan.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Stage
from pipeplan.profile import Layer, Profile, Tensor
from pipeplan.replan.lost import Left, without, workers_named
from pipeplan.replan.moved import moves

TWO_BY_TWO = """
format = "pipeplan-cluster"
version = 1
name = "lab"
[device]
name = "core"
kind = "{kind}"
memory = "{memory}"
[[level]]
name = "server"
count = {inside}
bandwidth = "1 GB/s"
latency = "5 us"
[[level]]
name = "cluster"
count = {servers}
bandwidth = "1 Gbit/s"
latency = "50 us"
"""
UNEQUAL = """
format = "pipeplan-cluster"
version = 1
name = "lab"
[[device]]
name = "core"
kind = "cpu"
memory = "4 GiB"
[[server]]
device = "core"
devices = 2
bandwidth = "1 GB/s"
latency = "5 us"
[[server]]
device = "core"
devices = 1
bandwidth = "1 GB/s"
latency = "5 us"
[[server]]
device = "core"
devices = 2
bandwidth = "1 GB/s"
latency = "5 us"
[[level]]
name = "cluster"
bandwidth = "1 Gbit/s"
latency = "50 us"
"""


def _files(
    servers: int = 3,
    inside: int = 2,
    kind: str = "cpu",
    memory: str = "4 GiB",
    minibatch: int = 8,
    saved: int = 1 << 20,
) -> None:
    text = TWO_BY_TWO.format(servers=servers, inside=inside, kind=kind, memory=memory)
    Path("lab.toml").write_text(text)
    sizes = [40, 10, 20, 200, 30, 10]
    Profile(
        layers=tuple(
            Layer(f"l{number}", 0.01 * (number + 1), 0.02 * (number + 1), size << 16, saved, buffer_bytes=64)
            for number, size in enumerate(sizes)
        ),
        tensors=tuple(Tensor(f"t{n}", f"l{n}", (f"l{n + 1}",), 1 << 20, 1 << 20) for n in range(len(sizes) - 1)),
        minibatch=minibatch,
        model_ref="/model.py:build",
        model_name="chain",
        graph_hash="sha256:abc",
    ).save(Path("profile.json"))


def _solve(run: Run, *options: str) -> dict[str, Any]:
    done = run("solve", "--cluster", "lab.toml", *options)
    assert done.code == 0, done.err
    return _plan("plan")


def _plan(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "plan.json").read_text())
    return found


def _replan(run: Run, *arguments: str) -> dict[str, Any]:
    done = run("replan", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def _checkpoint(run: str, name: str, **changes: Any) -> None:
    folder = Path(run, "checkpoints", name)
    folder.mkdir(parents=True)
    content = {"format": "pipeplan-checkpoint", "version": 2, "model": {"graph_hash": "sha256:abc"}}
    content |= {"epoch": 0, "minibatch": 5, "minibatches": 9, "files": {"__0_0.distcp": 3}}
    (folder / "__0_0.distcp").write_text("abc")
    (folder / "manifest.json").write_text(json.dumps(content | changes))


LAST = "epoch-0011-sample-00000024"


def _three_levels() -> Cluster:
    levels = (Level("server", 2, 100.0), Level("rack", 2, 10.0), Level("cluster", 2, 5.0))
    return Cluster("three", Device("d", "cpu", 1), levels)


# ---- what is left -----------------------------------------------------------------------------------------------


def _left(cluster: Cluster, lost: frozenset[int]) -> Left | None:
    """None where no cluster can express it."""
    try:
        return without(cluster, lost)
    except InputError as error:
        if "nothing is left" in str(error) or "--cluster" in str(error):
            return None
        raise


@pytest.mark.parametrize("draw", [random_instance, unequal_instance])
def test_what_is_left_is_what_was_there(draw: Any) -> None:
    """Every worker is on the device that it was on, with the same neighbours at every level; no lost one is left."""
    reduced = 0
    for seed in range(150):
        cluster = drawn(seed, draw)[1].cluster
        rng = random.Random(seed)
        lost = frozenset(worker for worker in range(cluster.workers) if rng.random() < 0.3)
        if (left := _left(cluster, lost)) is None:
            continue
        reduced += bool(lost)
        assert set(left.workers) == set(range(cluster.workers)) - lost
        assert left.cluster.workers == len(left.workers)
        assert left.cluster.devices == tuple(cluster.devices[worker] for worker in left.workers)
        assert [left.servers[left.cluster.server_of(worker)] for worker in range(len(left.workers))] == [
            cluster.server_of(worker) for worker in left.workers
        ]
        for one, other in itertools.combinations(range(len(left.workers)), 2):
            pair = left.workers[one], left.workers[other]
            assert left.cluster.level_between(one, other) == cluster.level_between(*pair), (seed, lost)
    assert reduced > 30


def test_links_and_prices_stay() -> None:
    cluster = cluster_file.load("A")
    assert without(cluster, frozenset()).cluster == cluster
    whole = without(cluster, workers_named(["server1"], cluster)).cluster
    assert whole == cluster.with_servers(3)
    unequal = without(cluster, workers_named(["server1.worker2", "worker3"], cluster)).cluster
    assert unequal.server_sizes == (3, 3, 4, 4)
    assert unequal.levels[1] == cluster.levels[1]
    assert {machine.inside.bandwidth for machine in unequal.machines} == {12e9}
    # One worker less on each server: equal servers again, so that certificates and quick searches are to be had.
    again = without(unequal, workers_named(["server2.worker0", "server3.worker0"], unequal)).cluster
    assert (again.uniform, again.server_sizes) == (True, (3, 3, 3, 3))


def test_names_count_from_zero() -> None:
    cluster = _three_levels()
    assert workers_named(["server2"], cluster) == {4, 5}
    assert workers_named(["worker5", "server2.worker1", "worker0"], cluster) == {0, 5}
    left = without(cluster, workers_named(["server0", "server2"], cluster))
    assert (left.workers, left.servers) == ((2, 3, 6, 7), (1, 3))
    assert [level.count for level in left.cluster.levels] == [2, 1, 2]
    assert [without(cluster, frozenset(range(4))).cluster.levels[index].count for index in range(3)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["server4"], "has no server 4: it has servers 0 to 3"),
        (["worker8"], "has no worker 8: it has workers 0 to 7"),
        (["server1.worker2"], "server 1 has no worker 2: it has workers 0 to 1"),
        (["rack1"], "expected servers and workers by their numbers"),
        (["server"], "expected servers"),
        (["server-1"], "expected servers"),
        (["server1.server2"], "expected servers"),
        (["worker99999999999999999999"], "expected servers"),
        ([""], "expected servers"),
        (["server0", "server1", "server2", "server3"], "all 8 workers of cluster three are lost"),
        (
            ["server1"],
            r"level rack of cluster three would join unequal numbers of the level server \(1, 2\).*--cluster",
        ),
    ],
)
def test_nonsense_is_one_line(names: list[str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        without(_three_levels(), workers_named(names, _three_levels()))


def test_servers_with_levels_inside_stay_equal_inside() -> None:
    cluster = Cluster(
        "c", Device("d", "cpu", 1), (Level("board", 2, 9.0), Level("server", 2, 5.0), Level("all", 2, 1.0))
    )
    left = without(cluster, workers_named(["server1"], cluster))
    assert [level.count for level in left.cluster.levels] == [2, 2, 1]
    with pytest.raises(InputError, match=r"unequal inside.*--cluster"):
        without(cluster, workers_named(["worker0"], cluster))


# ---- what moves -------------------------------------------------------------------------------------------------


def test_what_a_worker_takes_over_and_reads() -> None:
    weighty = [Layer(name, 1.0, 2.0, 100, 0, buffer_bytes=7) for name in "abc"]
    layers = (*weighty, Layer("loss", 1.0, 1.0, 0, 0))
    profile = Profile(layers, (), 4, optimizer_state_ratio=2.0)
    old = Plan((Stage(("a",), (0, 1, 2), 2, 2), Stage(("b", "c", "loss"), (3,), 1, 1)))
    new = Plan((Stage(("a", "b"), (0,), 2, 2), Stage(("c", "loss"), (1,), 1, 1)))
    cluster = Cluster("two", Device("d", "cpu", 1), (Level("server", 3, 1.0),))
    found = moves(old, new, Left(cluster, (2, 3, 1), (0,)), profile, minibatch_was=8)
    first, second, idle = found.workers
    assert (first.was, first.stage, first.stage_was, first.taken, first.read_bytes) == (2, 0, 0, ("b",), 614)
    assert (second.was, second.stage, second.stage_was, second.taken, second.read_bytes) == (3, 1, 1, (), 307)
    assert (idle.stage, idle.stage_was, idle.taken, idle.read_bytes) == (None, 0, (), 0)
    assert found.read_bytes == 921
    assert [(shift.layers, shift.stage_was, shift.stage) for shift in found.shifts] == [
        (("a",), 0, 0),
        (("b",), 1, 0),
        (("c", "loss"), 1, 1),
    ]
    assert found.restaged == 1
    # a: three minibatches of 8 before, one of 4 now; the loss has no weights to update.
    assert [(batch.layers, batch.samples_was, batch.samples) for batch in found.batches] == [
        (("a",), 24, 4),
        (("b", "c"), 8, 4),
    ]
    assert found.batches[0].rate == pytest.approx(1 / 6)
    unknown = moves(old, new, Left(cluster, (), ()), profile, 4)
    assert {worker.was for worker in unknown.workers} == {None}
    assert unknown.workers[0].taken == ("a", "b")


def test_a_common_batch_stays() -> None:
    profile = Profile((Layer("a", 1.0, 2.0, 100, 0), Layer("b", 1.0, 2.0, 100, 0)), (), 4)
    stages = Stage(("a",), (0, 1), 2, 2), Stage(("b",), (2,), 1, 2)
    old = Plan(stages, schedule="2bw", accumulate=8)
    new = Plan((Stage(("a", "b"), (0,), 1, 2),), schedule="2bw", accumulate=8)
    cluster = Cluster("one", Device("d", "cpu", 1), (Level("server", 1, 1.0),))
    assert moves(old, new, Left(cluster, (0,), (0,)), profile, 4).rebatched == ()


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--schedule", "2bw", "--accumulate", "4"],
        ["--schedule", "vertical-sync", "--overlap", "0.5"],
        ["--straight", "--no-recompute"],
        ["--stages", "2", "--pin", "l1=1", "--together", "l3,l4", "--no-cut-after", "l4"],
        ["--inference", "--max-replicas", "2", "--max-stages", "4", "--max-workers", "4"],
        ["--minibatch", "16", "--no-contention", "--boundary", "parallel", "--ignore-memory"],
    ],
)
def test_the_plan_is_that_of_a_fresh_solve_for_what_is_left(run: Run, options: list[str]) -> None:
    _files()
    before = _solve(run, *options)
    report = _replan(run, "plan", "--lost", "server1.worker0")
    Path("lab.toml").write_text(UNEQUAL)
    assert run("solve", "--cluster", "lab.toml", *options, "-o", "fresh").code == 0
    replanned, fresh = _plan("plan-replanned"), _plan("fresh")
    for part in ("plan", "prediction", "cluster", "options", "profile", "bound_s", "baselines"):
        assert replanned[part] == fresh[part], part
    assert replanned["options"] == before["options"]
    assert replanned["verdict"]["proven"] is fresh["verdict"]["proven"]
    assert {worker for stage in replanned["plan"]["stages"] for worker in stage["workers"]} <= set(range(5))
    assert [worker["was"] for worker in report["workers"]] == [0, 1, 3, 4, 5]
    assert report["now"]["minibatch_s"] == fresh["prediction"]["minibatch_s"]
    assert report["plan"]["plan"] == replanned["plan"]
    assert run("check", "plan-replanned").code == 0


def test_a_server_less_is_a_cluster_with_fewer(run: Run) -> None:
    _files()
    before = _solve(run)
    report = _replan(run, "plan", "--lost", "worker0, worker1", "--lost", "server2")
    assert run("solve", "--cluster", "lab.toml", "--servers", "1", "-o", "fresh").code == 0
    assert _plan("plan-replanned")["cluster"] == _plan("fresh")["cluster"]
    assert _plan("plan-replanned")["certificate"] == _plan("fresh")["certificate"] is not None
    assert report["servers"] == [{"server": 0, "was": 1}]
    assert (report["before"]["workers"], report["now"]["workers"]) == (6, 2)
    pace = before["prediction"]["minibatch_s"] / _plan("fresh")["prediction"]["minibatch_s"]
    assert report["pace"] == pytest.approx(pace)
    assert _plan("plan") == before


def test_launching_says_which_server_is_which(run: Run) -> None:
    _files(kind="cuda", inside=3)
    _solve(run)
    _checkpoint("plan/runs/20260101T000000Z", "epoch-0001-sample-00000040")
    done = run("replan", "--lost", "server0", "--lost", "server1.worker0")
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "Without server0, server1.worker0: 2 of 3 servers and 5 of 9 workers are left." in said
    assert "MASTER_ADDR and MASTER_PORT being those of server 0 (server 1 of before):" in said
    resume = "plan-replanned/launch.sh --resume-from plan/runs/20260101T000000Z"
    assert f"  NODE_RANK=0 CUDA_VISIBLE_DEVICES=1,2 {resume}\n  NODE_RANK=1 {resume}\n" in done.out
    name = "epoch-0001-sample-00000040"
    last = f"Last checkpoint: plan/runs/20260101T000000Z/checkpoints/{name}, after 5 of 9 minibatches of epoch 1."
    assert last in done.out.splitlines()
    done = run("replan", "plan-replanned", "--lost", "server1", "--run", "plan/runs/20260101T000000Z")
    assert ", on server 0 of before:\n  plan-replanned-2/launch.sh --resume-from plan/runs/" in done.out
    assert run("replan", "plan-replanned-2", "--lost", "worker1", "--no-write").code == 0
    assert not Path("plan-replanned-3").exists()
    assert run("replan", "plan-replanned-2", "--lost", "worker1").code == 0
    assert Path("plan-replanned-3/launch.sh").exists()


def test_the_latest_complete_checkpoint_is_found(run: Run) -> None:
    _files()
    _solve(run)
    assert _replan(run, "--lost", "server0", "--no-write")["checkpoint"] is None
    assert "No complete checkpoint in plan/runs" in run("replan", "--lost", "server0", "--no-write").out
    for epoch, minibatch in ((1, 9), (10, 3), (10, 2), (2, 8)):
        name = f"epoch-{epoch + 1:04d}-sample-{minibatch * 8:08d}"
        _checkpoint("plan/runs/20260101T000000Z", name, epoch=epoch, minibatch=minibatch)
    Path("plan/runs/20260102T000000Z/checkpoints/epoch-0001-sample-00000040").mkdir(parents=True)
    found = _replan(run, "--lost", "server0", "--no-write")["checkpoint"]
    assert found["run"] == "plan/runs/20260101T000000Z"
    assert (found["folder"], found["epoch"], found["minibatch"]) == (f"{found['run']}/checkpoints/{LAST}", 10, 3)
    _checkpoint("elsewhere", "epoch-0004-sample-00000040", epoch=3)
    named = "elsewhere/checkpoints/epoch-0004-sample-00000040"
    for number, path in enumerate(("elsewhere", named)):
        report = _replan(run, "--lost", "server0", "--run", path, "-o", f"new-{number}")
        assert (report["checkpoint"]["run"], report["checkpoint"]["epoch"]) == ("elsewhere", 3)
        assert report["commands"][0]["arguments"] == [f"new-{number}/launch.sh", "--resume-from", path]


def test_a_damaged_checkpoint_is_left_out(run: Run) -> None:
    _files()
    _solve(run)
    _checkpoint("plan/runs/a", "epoch-0001-sample-00000040")
    _checkpoint("plan/runs/b", "epoch-0001-sample-00000040", epoch=1)
    _checkpoint("plan/runs/b", "epoch-0001-sample-00000080", files={"__0_0.distcp": 3, "__1_0.distcp": 3})
    _checkpoint("plan/runs/b", "epoch-0001-sample-00000120")
    Path("plan/runs/b/checkpoints/epoch-0001-sample-00000120/manifest.json").write_text('{"format": ')
    done = run("replan", "--lost", "server0,server1")
    assert done.code == 0
    lines = done.out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Left out: "))
    assert "epoch-0001-sample-00000120/manifest.json is not valid JSON" in lines[start]
    assert "epoch-0001-sample-00000080/__1_0.distcp is missing" in lines[start + 1]
    assert lines[start + 2].startswith("Last checkpoint: plan/runs/b/checkpoints/epoch-0001-sample-00000040,")
    # The run's latest is not the one, so that it is named itself.
    assert lines[start + 4].endswith("--resume-from plan/runs/b/checkpoints/epoch-0001-sample-00000040")
    Path("plan/runs/b/checkpoints/epoch-0001-sample-00000040/__0_0.distcp").write_text("")
    found = _replan(run, "--lost", "server0", "--no-write")["checkpoint"]
    assert (found["run"], len(found["damaged"])) == ("plan/runs/a", 3)
    said = _refused(run, "--lost", "server0", "-o", "other", "--run", "plan/runs/b")
    assert "plan/runs/b has no complete checkpoint to go on from: " in said


def _refused(run: Run, *arguments: str) -> str:
    before = sorted(str(path) for path in Path().rglob("*"))
    done = run("replan", *arguments)
    assert done.code == 2, done
    assert done.err.splitlines()[-1].startswith("error: ")
    assert done.err.count("error: ") == 1
    assert sorted(str(path) for path in Path().rglob("*")) == before, "something was written"
    return done.err


def test_what_cannot_be_is_refused_in_one_line(run: Run) -> None:
    _files()
    assert "has no plan.json" in _refused(run, "plan", "--lost", "server0")
    _solve(run, "--stages", "4")
    assert "say what is gone" in _refused(run)
    assert "has no server 3: it has servers 0 to 2" in _refused(run, "--lost", "server3")
    assert "all 6 workers of cluster lab are lost" in _refused(run, "--lost", "server0,server1,server2")
    assert "give one of them" in _refused(run, "--lost", "server0", "--cluster", "A")
    assert "go with --cluster" in _refused(run, "--lost", "server0", "--servers", "1")
    assert "there is no cluster 'Z'" in _refused(run, "--cluster", "Z")
    few = _refused(run, "--lost", "server0,server1")
    assert "4 stages were asked for, and 2 workers are left" in few
    assert "--relax stages" in few
    assert "number of stages must be at least 1" in _refused(run, "--lost", "server0", "--stages", "0")
    assert "already holds a plan" in _refused(run, "--lost", "server0", "-o", "plan")
    assert "has no complete checkpoint" in _refused(run, "--lost", "server0", "--run", "nowhere")
    assert "needs a number of minibatches per update" in _refused(run, "--lost", "server0", "--schedule", "gpipe")
    _checkpoint("plan/runs/a", "epoch-0001-sample-00000040", model={"graph_hash": "sha256:other"})
    assert "is of another model" in _refused(run, "--lost", "server0")


def test_the_profile_has_to_be_the_plans(run: Run) -> None:
    _files()
    _solve(run)
    Path("here").mkdir()
    Path("profile.json").rename("here/mine.json")
    assert "name it with --profile" in _refused(run, "--lost", "server0")
    assert _replan(run, "--lost", "server0", "--profile", "here/mine.json", "--no-write")["lost"] == ["server0"]
    _files(minibatch=4)
    assert "their digests differ" in _refused(run, "--lost", "server0", "--profile", "profile.json")


def test_a_damaged_plan_is_no_plan_to_begin_with(run: Run) -> None:
    _files()
    document = _solve(run, "--stages", "2")
    document["plan"]["stages"][0]["workers"] = [77]
    Path("plan/plan.json").write_text(json.dumps(document))
    assert "no plan to begin with: the plan uses worker 77" in _refused(run, "--lost", "server0")
    document["plan"]["stages"][0] |= {"workers": [0], "layers": ["l0"]}
    Path("plan/plan.json").write_text(json.dumps(document))
    assert "in the profile but not the plan" in _refused(run, "--lost", "server0")


def test_the_old_plan_is_replaced_where_asked_only(run: Run) -> None:
    _files()
    before = _solve(run)
    _checkpoint("plan/runs/a", "epoch-0001-sample-00000040")
    report = _replan(run, "--lost", "server0", "-o", "plan", "--force")
    assert _plan("plan")["cluster"]["levels"][1]["count"] == 2
    assert report["before"]["config"] == before["plan"]["config"]
    assert report["checkpoint"]["run"] == "plan/runs/a"
    assert Path("plan/runs/a/checkpoints/epoch-0001-sample-00000040/manifest.json").exists()


def test_options_given_here_replace_those_of_the_plan(run: Run) -> None:
    _files()
    before = _solve(run, "--schedule", "gpipe", "--accumulate", "4", "--stages", "4", "--straight")
    report = _replan(run, "--lost", "server0,server1", "--relax", "stages", "--schedule", "1f1b-flush", "--no-write")
    options = report["plan"]["options"]
    changed = {"stages": None, "schedule": "1f1b-flush"}
    assert options == before["options"] | changed
    options = _replan(run, "--lost", "server0", "--relax", "straight", "--stages", "2", "--no-write")["plan"]["options"]
    assert options == before["options"] | {"stages": 2, "max_replicas": None, "allow_copies": True}
    options = _replan(run, "--lost", "server0", "--schedule", "1f1b-stashing", "--no-write")["plan"]["options"]
    assert options == before["options"] | {"schedule": "1f1b-stashing", "accumulate": None}
    report = _replan(run, "--lost", "server0", "--minibatch", "16", "--no-write")
    assert report["plan"]["profile"]["minibatch"] == 16
    # Four minibatches an update as before, each of twice the samples.
    assert {(batch["samples_was"], batch["samples"], batch["rate"]) for batch in report["updates"]} == {(32, 64, 2.0)}


def test_another_cluster_altogether(run: Run) -> None:
    _files()
    before = _solve(run)
    assert before["options"]["overlap"] == 0.0
    report = _replan(run, "--cluster", "A", "--servers", "2")
    assert report["plan"]["cluster"]["name"] == "A"
    assert report["plan"]["options"] == before["options"] | {"overlap": 1.0}, "the usual one for devices of its kind"
    assert {worker["was"] for worker in report["workers"]} == {None}
    done = run("replan", "--cluster", "local", "--workers", "3", "--no-write")
    assert done.code == 0
    assert "Another cluster, local: 1 server instead of 3, 3 workers instead of 6." in done.out


def test_too_little_memory_says_what_would_do(run: Run) -> None:
    # With one worker a stage the first stage has as many minibatches in flight as there are stages.
    _files(memory="80 MiB", saved=8 << 20)
    _solve(run, "--no-recompute", "--stages", "2")
    gone = ["--lost", "server0,server1"]
    said = _refused(run, *gone)
    assert "nothing fits in memory" in said
    hints = said.split("of the options here ")[1].removesuffix(" would do\n").split(", ")
    assert hints == ["--relax no-recompute", "--minibatch 4"]
    for hint in hints:
        assert run("replan", *gone, *hint.split(), "--no-write").code == 0


def test_replanning_never_imports_torch(run: Run, tmp_path: Path) -> None:
    _files()
    _solve(run)
    code = (
        "import sys\nfrom pipeplan.cli import cli\ncli.main(['replan', '--lost', 'server1'], standalone_mode=False)\n"
    )
    code += "assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    assert Path("plan-replanned/plan.json").exists()


def test_the_table_puts_like_workers_together(run: Run) -> None:
    _files(inside=4, servers=2)
    _solve(run, "--stages", "1")
    done: Ran = run("replan", "--lost", "server1", "--no-write")
    rows = [line.split() for line in done.out.splitlines()]
    assert ["0-3", "0-3", "0", "0", "1", "1", "-"] in [row[:7] for row in rows]
    assert "Batch: an update of l0 … l5 (6) averages 4 minibatches instead of 8" in " ".join(done.out.split())
