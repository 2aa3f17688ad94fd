"""`pipeplan replan`: what is left after a loss, the plan for that, what moves to it, and how training goes on."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, run_once
from instances import drawn, random_instance, unequal_instance
from long_chains import chain
from manifests import write_manifest

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import read_cluster
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.plan_file import read_plan
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.replanning.migration import plan_changes
from pipeplan.replanning.remaining_cluster import RemainingCluster, remove_workers, workers_named
from pipeplan_launch.checkpoint.manifest import Model, Position

HEAD = 'format = "pipeplan-cluster"\nversion = 1\nname = "lab"\n'
INSIDE = 'bandwidth = "1 GB/s"\nlatency = "5 us"\n'
OUTSIDE = '[[level]]\nname = "cluster"\nbandwidth = "1 Gbit/s"\nlatency = "50 us"\n'
UNEQUAL = HEAD + '[[device]]\nname = "core"\nkind = "cpu"\nmemory = "4 GiB"\n'
UNEQUAL += "".join(f'[[server]]\ndevice = "core"\ndevices = {count}\n{INSIDE}' for count in (2, 1, 2)) + OUTSIDE


def _files(
    servers: int = 3,
    inside: int = 2,
    kind: str = "cpu",
    memory: str = "4 GiB",
    minibatch: int = 8,
    saved: int = 1 << 20,
) -> None:
    device = f'[device]\nname = "core"\nkind = "{kind}"\nmemory = "{memory}"\n'
    level = f'[[level]]\nname = "server"\ncount = {inside}\n{INSIDE}'
    Path("lab.toml").write_text(f"{HEAD}{device}{level}{OUTSIDE}count = {servers}\n")
    layers = [
        Layer(f"l{number}", 0.01 * (number + 1), 0.02 * (number + 1), size << 16, saved, buffer_bytes=64)
        for number, size in enumerate([40, 10, 20, 200, 30, 10])
    ]
    named = {"model_ref": "/model.py:build", "model_name": "chain", "graph_hash": "sha256:abc"}
    chain(layers, 1 << 20, minibatch, **named).save(Path("profile.json"))


def _solve(run: Run, *options: str) -> Any:
    old = () if "--inference" in options else ("--staleness", "any")
    done = run_once(run, "solve", *old, "--cluster", "lab.toml", "--solver", "dp", *options)
    assert done.code == 0, done.err
    return _plan("plan")


def _plan(folder: str) -> Any:
    return json.loads(Path(folder, "plan.json").read_text())


def _replan(run: Run, *arguments: str) -> Any:
    done = run("replan", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def _checkpoint(run: str, name: str, epoch: int = 0, minibatch: int = 5, **changes: Any) -> Path:
    """A complete checkpoint of one file of three bytes."""
    folder = Path(run, "checkpoints", name)
    folder.mkdir(parents=True)
    (folder / "tensors-0.safetensors").write_text("abc")
    write_manifest(folder, Position(epoch, minibatch, 9), **({"files": {"tensors-0.safetensors": 3}} | changes))
    return folder / "manifest.json"


LAST = "epoch-0011-sample-00000024"
QUICK = ("--solver", "dp")
"""For tests that look at what is said beside the plan."""


@pytest.mark.parametrize(
    "options",
    [
        ["--schedule", "1f1b-stashing"],
        pytest.param(["--schedule", "2bw", "--batch", "32"], marks=pytest.mark.slow),
        pytest.param(["--schedule", "vertical-sync"], marks=pytest.mark.slow),
        ["--max-replicas", "1", "--no-recompute", "--schedule", "1f1b-stashing"],
        ["--schedule", "1f1b-stashing", "--stages", "2", "--pin", "l1=1", "--together", "l3,l4"],
        ["--inference", "--max-replicas", "2", "--stages", "1-4", "--max-workers", "4"],
        ["--schedule", "1f1b-stashing", "--microbatch", "16", "--ignore-memory"],
    ],
)
def test_the_plan_is_that_of_a_fresh_solve_for_what_is_left(run: Run, options: list[str]) -> None:
    _files()
    before = _solve(run, *options)
    report = _replan(run, "plan", "--lost", "server1.worker0", "--solver", "dp")
    Path("lab.toml").write_text(UNEQUAL)
    # The servers that are left keep the order in which they run, which a solve of the command line may change.
    left = replace(read_plan(Path("plan"), None)[0], cluster=read_cluster(Path("lab.toml")))
    write_plan(solve(left, Settings(solver="dp", simplify=True)), Path("fresh"))
    replanned, fresh = _plan("plan-replanned"), _plan("fresh")
    for part in ("plan", "prediction", "cluster", "options", "profile", "bound_s", "baselines"):
        assert replanned[part] == fresh[part], part
    assert replanned["options"] == before["options"]
    assert replanned["verdict"]["proven"] is fresh["verdict"]["proven"]
    assert {worker for stage in replanned["plan"]["stages"] for worker in stage["workers"]} <= set(range(5))
    assert [worker["was"] for worker in report["workers"]] == [0, 1, 3, 4, 5]
    assert report["now"]["minibatch_s"] == fresh["stated"]["minibatch_s"]
    assert report["plan"]["plan"] == replanned["plan"]
    assert run("check", "plan-replanned").code == 0


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
    done = run("replan", "plan-replanned", "--lost", "server1", "--run", "plan/runs/20260101T000000Z", *QUICK)
    assert ", on server 0 of before:\n  plan-replanned-2/launch.sh --resume-from plan/runs/" in done.out
    assert run("replan", "plan-replanned-2", "--lost", "worker1", "--no-write", *QUICK).code == 0
    assert not Path("plan-replanned-3").exists()
    assert run("replan", "plan-replanned-2", "--lost", "worker1", *QUICK).code == 0
    assert Path("plan-replanned-3/launch.sh").exists()


def test_the_latest_complete_checkpoint_is_found(run: Run) -> None:
    _files()
    _solve(run)
    assert _replan(run, "--lost", "server0", "--no-write", *QUICK)["checkpoint"] is None
    assert "No complete checkpoint in plan/runs" in run("replan", "--lost", "server0", "--no-write", *QUICK).out
    for epoch, minibatch in ((1, 9), (10, 3), (10, 2), (2, 8)):
        name = f"epoch-{epoch + 1:04d}-sample-{minibatch * 8:08d}"
        _checkpoint("plan/runs/20260101T000000Z", name, epoch=epoch, minibatch=minibatch)
    Path("plan/runs/20260102T000000Z/checkpoints/epoch-0001-sample-00000040").mkdir(parents=True)
    found = _replan(run, "--lost", "server0", "--no-write", *QUICK)["checkpoint"]
    assert found["run"] == "plan/runs/20260101T000000Z"
    assert (found["folder"], found["epoch"], found["minibatch"]) == (f"{found['run']}/checkpoints/{LAST}", 10, 3)
    assert (found["skipped"], found["damaged"]) == (["plan/runs/20260102T000000Z"], [])
    said = run("replan", "--lost", "server0", "--no-write", *QUICK).out
    assert "Left out: plan/runs/20260102T000000Z is a later run, and has no checkpoint." in said.splitlines()
    _checkpoint("elsewhere", "epoch-0004-sample-00000040", epoch=3)
    named = "elsewhere/checkpoints/epoch-0004-sample-00000040"
    for number, path in enumerate(("elsewhere", named)):
        report = _replan(run, "--lost", "server0", "--run", path, "-o", f"new-{number}", *QUICK)
        assert (report["checkpoint"]["run"], report["checkpoint"]["epoch"]) == ("elsewhere", 3)
        assert report["commands"][0]["arguments"] == [f"new-{number}/launch.sh", "--resume-from", path]


def test_a_damaged_checkpoint_is_left_out(run: Run) -> None:
    _files()
    _solve(run)
    _checkpoint("plan/runs/a", "epoch-0001-sample-00000040")
    _checkpoint("plan/runs/b", "epoch-0001-sample-00000040", epoch=1)
    _checkpoint(
        "plan/runs/b", "epoch-0001-sample-00000080", files={"tensors-0.safetensors": 3, "tensors-1.safetensors": 3}
    )
    cut_off = _checkpoint("plan/runs/b", "epoch-0001-sample-00000120")
    cut_off.write_text('{"format": ')
    flipped = _checkpoint("plan/runs/b", "epoch-0001-sample-00000160")
    flipped.write_text(flipped.read_text().replace('"lr": 0.1', '"lr": 0.9'))
    done = run("replan", "--lost", "server0,server1", *QUICK)
    assert done.code == 0
    lines = done.out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Left out: "))
    assert "epoch-0001-sample-00000160/manifest.json is not as it was written" in lines[start]
    assert "epoch-0001-sample-00000120/manifest.json cannot be read" in lines[start + 1]
    assert "epoch-0001-sample-00000080/tensors-1.safetensors is missing" in lines[start + 2]
    assert lines[start + 3].startswith("Last checkpoint: plan/runs/b/checkpoints/epoch-0001-sample-00000040,")
    # The run's latest is not the one, so that it is named itself.
    assert lines[start + 5].endswith("--resume-from plan/runs/b/checkpoints/epoch-0001-sample-00000040")
    Path("plan/runs/b/checkpoints/epoch-0001-sample-00000040/tensors-0.safetensors").write_text("")
    found = _replan(run, "--lost", "server0", "--no-write", *QUICK)["checkpoint"]
    assert (found["run"], len(found["damaged"])) == ("plan/runs/a", 4)
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
    stashing, flush = "--lost server0 --schedule 1f1b-stashing", "--lost server0 --schedule 1f1b-flush"
    for arguments, says in (
        ("", "say what is gone"),
        ("--lost server3", "has no server 3: it has servers 0 to 2"),
        ("--lost server0,server1,server2", "all 6 workers of cluster lab are lost"),
        ("--lost server0 --cluster A", "give one of them"),
        ("--lost server0 --servers 1", "go with --cluster"),
        ("--cluster Z", "there is no cluster 'Z'"),
        ("--lost server0,server1", "4 stages were asked for, and 2 workers are left: ask for fewer with --stages"),
        ("--lost server0 --stages 0", "--stages: expected at least 1 stage"),
        ("--lost server0 -o plan", "already holds a plan"),
        ("--lost server0 --run nowhere", "has no complete checkpoint"),
        (f"{stashing} --batch 32", "--batch goes with --schedule 2bw, gpipe, 1f1b-flush"),
        (f"{flush} --batch 33", "a batch of 33 samples cannot be cut into microbatches of 8"),
    ):
        assert says in _refused(run, *arguments.split()), arguments
    _checkpoint("plan/runs/a", "epoch-0001-sample-00000040", model=Model("model.py:build", "sha256:other"))
    assert "is of another model" in _refused(run, "--lost", "server0")


def test_another_profile_or_a_damaged_plan_is_refused(run: Run) -> None:
    _files()
    document = _solve(run, "--stages", "2")
    Path("here").mkdir()
    Path("profile.json").rename("here/mine.json")
    assert "name it with --profile" in _refused(run, "--lost", "server0")
    mine = ("--profile", "here/mine.json")
    assert _replan(run, "--lost", "server0", *mine, "--no-write", *QUICK)["lost"] == ["server0"]
    _files(minibatch=4)
    assert "their digests differ" in _refused(run, "--lost", "server0", "--profile", "profile.json")
    first = document["plan"]["stages"][0]
    for part, change, says in (
        (first, {"workers": [77]}, "cannot be replanned: the plan uses worker 77"),
        (first, {"workers": [0], "layers": ["l0"]}, "in the profile but not the plan"),
        (document["prediction"], {"minibatch_s": 0}, "it states no step time"),
    ):
        part |= change
        Path("plan/plan.json").write_text(json.dumps(document))
        assert says in _refused(run, "--lost", "server0", *mine)


def test_the_old_plan_is_replaced_where_asked_only(run: Run) -> None:
    _files()
    before = _solve(run)
    _checkpoint("plan/runs/a", "epoch-0001-sample-00000040")
    report = _replan(run, "--lost", "server0", "-o", "plan", "--force", *QUICK)
    assert _plan("plan")["cluster"]["levels"][1]["count"] == 2
    assert report["before"]["config"] == before["plan"]["config"]
    assert report["checkpoint"]["run"] == "plan/runs/a"
    assert Path("plan/runs/a/checkpoints/epoch-0001-sample-00000040/manifest.json").exists()


def test_options_given_here_replace_those_of_the_plan(run: Run) -> None:
    _files()
    before = _solve(run, "--schedule", "gpipe", "--batch", "32", "--stages", "4", "--max-replicas", "1")
    for arguments, changed in (
        (
            "--lost server0,server1 --relax stages --schedule 1f1b-flush",
            {"stages": None, "schedule": "1f1b-flush"},
        ),
        ("--lost server0 --relax max-replicas --stages 2", {"stages": 2, "max_replicas": None}),
        ("--lost server0 --schedule 1f1b-stashing", {"schedule": "1f1b-stashing", "accumulate": None}),
        ("--lost server0 --schedule 1f1b-flush --batch 64", {"schedule": "1f1b-flush", "accumulate": 8}),
    ):
        report = _replan(run, *arguments.split(), "--no-write", *QUICK)
        assert report["plan"]["options"] == before["options"] | changed
    report = _replan(run, "--lost", "server0", "--microbatch", "16", "--no-write", *QUICK)
    assert report["plan"]["profile"]["minibatch"] == 16
    # Four minibatches an update as before, each of twice the samples.
    assert {(batch["samples_was"], batch["samples"], batch["rate"]) for batch in report["updates"]} == {(32, 64, 2.0)}


def test_another_cluster_altogether(run: Run) -> None:
    _files()
    before = _solve(run)
    assert before["options"]["overlap"] == 0.0
    report = _replan(run, "--cluster", "A", "--servers", "1", *QUICK)
    assert report["plan"]["cluster"]["name"] == "A"
    assert report["plan"]["options"] == before["options"] | {"overlap": 1.0}, "the usual one for devices of its kind"
    assert {worker["was"] for worker in report["workers"]} == {None}
    done = run("replan", "--cluster", "local", "--workers", "3", "--no-write", *QUICK)
    assert done.code == 0
    assert "Another cluster, local: 1 server instead of 3, 3 workers instead of 6." in done.out


def test_too_little_memory_says_what_would_do(run: Run) -> None:
    # With one worker a stage the first stage has as many minibatches in flight as there are stages.
    _files(memory="84.3 MiB", saved=8 << 20)
    _solve(run, "--no-recompute", "--stages", "2")
    gone = ["--lost", "server0,server1"]
    said = _refused(run, *gone)
    assert "nothing fits in memory" in said
    hints = said.split("of the options here ")[1].removesuffix(" would do\n").split(", ")
    assert hints == ["--relax no-recompute", "--microbatch 4"]
    for hint in hints:
        assert run("replan", *gone, *hint.split(), "--no-write", *QUICK).code == 0


def test_the_table_puts_like_workers_together(run: Run) -> None:
    _files(inside=4, servers=2)
    _solve(run, "--stages", "1", "--schedule", "1f1b-stashing")
    done = run("replan", "--lost", "server1", "--no-write", *QUICK)
    rows = [line.split() for line in done.out.splitlines()]
    assert ["0-3", "0-3", "0", "0", "1", "1", "-"] in [row[:7] for row in rows]
    assert "Batch: an update of l0 … l5 (6) averages 4 minibatches instead of 8" in " ".join(done.out.split())


# What is left of a cluster, and what moves.


def _cluster(*levels: tuple[str, int]) -> Cluster:
    made = tuple(Level(name, count, 100.0 / 2**place) for place, (name, count) in enumerate(levels))
    return Cluster("three", Device("d", "cpu", 1), made)


THREE = _cluster(("server", 2), ("rack", 2), ("cluster", 2))


def _without(cluster: Cluster, *names: str) -> RemainingCluster:
    return remove_workers(cluster, workers_named(list(names), cluster))


@pytest.mark.parametrize("draw", [random_instance, unequal_instance])
def test_what_is_left_is_what_was_there(draw: Any) -> None:
    """Every worker is on the device that it was on, with the same neighbours at every level; no lost one is left."""
    reduced = 0
    for seed in range(150):
        cluster = drawn(seed, draw)[1].cluster
        rng = random.Random(seed)
        lost = frozenset(worker for worker in range(cluster.workers) if rng.random() < 0.3)
        try:
            left = remove_workers(cluster, lost)
        except InputError as error:
            if "nothing is left" in str(error) or "--cluster" in str(error):
                continue  # no cluster can express it
            raise
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
    cluster = cluster_toml.load_cluster("A")
    assert remove_workers(cluster, frozenset()).cluster == cluster
    assert _without(cluster, "server1").cluster == cluster.with_servers(3)
    unequal = _without(cluster, "server1.worker2", "worker3").cluster
    assert unequal.server_sizes == (3, 3, 4, 4)
    assert unequal.levels[1] == cluster.levels[1]
    assert {machine.inside.bandwidth for machine in unequal.machines} == {12e9}
    # One worker less on each server: equal servers again, so that certificates and quick searches are to be had.
    again = _without(unequal, "server2.worker0", "server3.worker0").cluster
    assert (again.uniform, again.server_sizes) == (True, (3, 3, 3, 3))


def test_names_count_from_zero_and_nonsense_is_one_line() -> None:
    assert workers_named(["server2"], THREE) == {4, 5}
    assert workers_named(["worker5", "server2.worker1", "worker0"], THREE) == {0, 5}
    left = _without(THREE, "server0", "server2")
    assert (left.workers, left.servers) == ((2, 3, 6, 7), (1, 3))
    assert [level.count for level in left.cluster.levels] == [2, 1, 2]
    assert [level.count for level in remove_workers(THREE, frozenset(range(4))).cluster.levels] == [2, 2, 1]
    boards = _cluster(("board", 2), ("server", 2), ("all", 2))
    assert [level.count for level in _without(boards, "server1").cluster.levels] == [2, 2, 1]
    unequal = r"level rack of cluster three would join unequal numbers of the level server \(1, 2\).*--cluster"
    for cluster, names, complaint in (
        (boards, ["worker0"], r"unequal inside.*--cluster"),
        (THREE, ["server4"], "has no server 4: it has servers 0 to 3"),
        (THREE, ["worker8"], "has no worker 8: it has workers 0 to 7"),
        (THREE, ["server1.worker2"], "server 1 has no worker 2: it has workers 0 to 1"),
        (THREE, ["server0", "server1", "server2", "server3"], "all 8 workers of cluster three are lost"),
        (THREE, ["server1"], unequal),
        *(
            (THREE, [odd], "expected servers and workers by their numbers")
            for odd in ("rack1", "server", "server-1", "server1.server2", f"worker{10**19}", "")
        ),
    ):
        with pytest.raises(InputError, match=complaint):
            _without(cluster, *names)


def _left(workers: tuple[int, ...], count: int) -> RemainingCluster:
    """One server of so many workers, which were these before."""
    return RemainingCluster(_cluster(("server", count)), workers, (0,) if workers else ())


def test_a_worker_with_several_stages_takes_over_the_layers_of_all() -> None:
    profile = Profile(tuple(Layer(name, 1.0, 2.0, 100, 0) for name in "abcdefgh"), (), 4)

    def stages(*names: str) -> Plan:
        half = len(names) // 2
        devices = [*range(half), *reversed(range(half))]
        parts = tuple(Stage(tuple(part), (device,), 1, 1) for part, device in zip(names, devices, strict=True))
        return Plan(parts, schedule="zb-v", accumulate=8)

    old, new = stages("a", "b", "c", "d", "e", "fgh"), stages("a", "bcd", "ef", "gh")
    first, second = plan_changes(old, new, _left((0, 1), 2), profile, minibatch_was=4).workers
    assert (first.stages, first.stages_was, first.taken) == ((0, 3), (0, 5), ())
    assert (second.stages, second.stages_was, second.taken) == ((1, 2), (1, 4), ("c", "d", "f"))


def test_what_a_worker_takes_over_and_reads() -> None:
    weighty = [Layer(name, 1.0, 2.0, 100, 0, buffer_bytes=7) for name in "abc"]
    profile = Profile((*weighty, Layer("loss", 1.0, 1.0, 0, 0)), (), 4, optimizer_state_ratio=2.0)
    old = Plan((Stage(("a",), (0, 1, 2), 2, 2), Stage(("b", "c", "loss"), (3,), 1, 1)))
    new = Plan((Stage(("a", "b"), (0,), 2, 2), Stage(("c", "loss"), (1,), 1, 1)))
    found = plan_changes(old, new, _left((2, 3, 1), 3), profile, minibatch_was=8)
    first, second, idle = found.workers
    assert (first.was, first.stages, first.stages_was, first.taken, first.read_bytes) == (2, (0,), (0,), ("b",), 614)
    assert (second.was, second.stages, second.stages_was, second.taken, second.read_bytes) == (3, (1,), (1,), (), 307)
    assert (idle.stages, idle.stages_was, idle.taken, idle.read_bytes) == ((), (0,), (), 0)
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
    unknown = plan_changes(old, new, _left((), 3), profile, 4)
    assert {worker.was for worker in unknown.workers} == {None}
    assert unknown.workers[0].taken == ("a", "b")
    # Where all stages update for a common batch, it stays.
    old = Plan(old.stages, schedule="2bw", accumulate=8)
    new = Plan((Stage(("a", "b", "c", "loss"), (0,), 1, 2),), schedule="2bw", accumulate=8)
    assert plan_changes(old, new, _left((0,), 1), profile, 4).rebatched == ()
