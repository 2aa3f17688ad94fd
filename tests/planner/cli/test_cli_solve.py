"""`pipeplan solve` as a person meets it: its answers, its options, clusters of servers that differ, and mistakes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, check_refusals, refused
from decoders import decoder
from runs import chain

from pipeplan.cluster_data.cluster_toml import read_cluster
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.plan_file import read_plan
from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.simulation.scenario import read_scenario
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.preflight import workers_to_start


def _save(path: Path = Path("profile.json"), saved: int = 6) -> None:
    Profile(
        layers=(Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 0, 4), Layer("c", 0.25, 0.5, 40, saved)),
        tensors=(Tensor("x", "a", ("b",), 8, 8), Tensor("y", "b", ("c",), 4, 4)),
        minibatch=4,
        model_name="small",
        model_ref="small.py:build",
    ).save(path)


QUICK = ("--solver", "dp")


def test_without_a_profile_there_is_an_example_and_nothing_is_written(run: Run) -> None:
    done = run("solve", "--cluster", "C", *QUICK)
    assert done.code == 0
    assert "vgg16 (bundled, as there is no profile.json here)" in done.err
    assert done.out.startswith("An example: there is no profile.json here, so this is VGG-16 on V100")
    assert done.err.splitlines()[-1].startswith("nothing was written: this is an example.")
    assert ("pipeplan solve vgg16-v100 --cluster C" in done.err, "NEXT" in done.out) == (True, False)
    document = json.loads(run("solve", "--cluster", "C", "--schedule", "1f1b-stashing", *QUICK, "--json").out)
    assert document["profile"]["path"] is None
    assert "there is no profile.json here to write a plan for" in refused(run, "solve", "--cluster", "C", "-o", "here")
    assert list(Path().iterdir()) == []


def test_a_bundled_profile_is_planned_for_by_its_name_and_one_in_this_folder_comes_first(run: Run) -> None:
    done = run("solve", "vgg16-v100", "--cluster", "B")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err, "no colours in a pipe"
    assert max(map(len, done.out.splitlines())) <= 80
    assert "vgg16 (bundled); modelled" in done.err
    assert not done.out.startswith("An example")
    assert "modelled on V100 SXM2 16 GB, not measured" in done.err
    for expected in ("\nRUN ", "stage 1", "of memory", "samples/s", "\nALSO ", "\nWHY ", "\nTRUST ", "\nNEXT "):
        assert expected in done.out
    assert "proven: no plan of the searched space is" in " ".join(done.out.split())
    assert Path("plan/launch.sh").exists()
    _save()
    done = run("solve", "--cluster", "A", "--servers", "1", "--json", "--no-write")
    assert "small (profile.json in this folder)" in done.err
    document = json.loads(done.out)
    assert (document["profile"]["model"], document["verdict"]["proven"]) == ("small", True)


def test_a_plan_that_was_used_is_refused_before_any_work_and_others_are_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save()
    for stages in "21":
        assert run("solve", "--cluster", "C", "--stages", stages, *QUICK).code == 0
        assert len(list(Path("plan/stages").iterdir())) == int(stages)
    script, plan = Path("plan/launch.sh"), Path("plan/plan.json")
    for path, old, new in ((script, "OMP_NUM_THREADS", "OMP_THREADS"), (plan, '"small"', '"smaller"')):
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new, 1))
        assert "already holds a plan" in run("solve", "--cluster", "C").err
        path.write_text(before)
    Path("plan/runs/20260131T120000Z").mkdir(parents=True)
    assert run("solve", "--cluster", "C", "--force", *QUICK).code == 0

    def search(*_arguments: object, **_named: object) -> None:
        raise AssertionError("a search began")

    monkeypatch.setattr("pipeplan.planning.candidates.best_in_time", search)
    monkeypatch.setattr("pipeplan.cli.solve_and_write.solve", search)
    for asked in ("", "--batch 8", "--schedule 1f1b-stashing"):
        assert refused(run, "solve", "--cluster", "C", *asked.split()).startswith("plan already holds a plan")


REFUSED = {
    "solve --workers two": "'two' is not a valid integer",
    "solve --servers 3": "the cluster local is one server",
    "solve --cluster A --servers 0": "cannot have 0 servers: a cluster has at least one",
    "solve --time-limit 0": "--time-limit must be above 0",
    "solve --solver magic": "--solver: there is no 'magic'; there are: dp, ilp, both",
    "solve -o profile.json": "profile.json is not a folder",
    "import nowhere.txt --microbatch 4 -o x.json": "cannot read nowhere.txt",
}
"""Further mistakes than those of docs/errors.md."""
BEFORE_THE_FOLDER = {
    f"--microbatch {10**24}": "at most 10000000",
    "--schedule auto --batch 8": "there is no schedule 'auto'",
    "--batch 0": "--batch must be at least 1 sample, not 0",
    "--batch -4": "--batch must be at least 1 sample, not -4",
    "--schedule 1f1b-stashing --batch 8": "leave out --batch",
    "--inference --batch 8": "--batch is for training",
    "--inference --staleness 0": "--staleness chooses among schedules",
    "--batch 8 --stages 9": "9 stages asked for",
    "--microbatch auto": "'auto' is not a valid integer",
    "--for megatron": "Megatron",
    "--for nobody": "there is no export for 'nobody'",
}


def test_what_cannot_be_used_gets_one_line_and_writes_nothing(run: Run) -> None:
    _save()
    check_refusals(run, REFUSED)
    _occupy("plan")
    check_refusals(run, {f"solve --cluster C {line}": said for line, said in BEFORE_THE_FOLDER.items()})


def _occupy(folder: str) -> None:
    Path(folder).mkdir()
    Path(folder, "plan.json").write_text("{}")


def test_nothing_fits_names_the_layer_and_what_is_missing(run: Run) -> None:
    said = "layer 'c' alone needs 64 GiB, 48.8 GiB more than the 15.2 GiB of one V100 16 GB"
    # Without a size the smallest one is named, a quarter of the profile's.
    for gibibytes, asked in ((64, ["--microbatch", "4"]), (256, [])):
        _save(saved=gibibytes << 30)
        assert said in refused(run, "solve", "--cluster", "A", "--servers", "1", *asked)


def test_what_a_profile_lacks_is_said_where_it_matters(run: Run) -> None:
    _save()
    whole = replace(Profile.load("profile.json"), provenance=Provenance("measured", "cpu"))
    solve = ("solve", "--cluster", "local", "--workers", "2", "--force", *QUICK)
    untrained = "the job has no loss and no data, so that it can be planned, but launch.sh cannot train it"
    unchecked = "not self-checked, whether stages train as the model alone does (--no-self-check)"
    for profile, more, said in (
        (whole, [], set()),
        (replace(whole, lacks=("loss", "data")), [], {untrained}),
        (replace(whole, lacks=("loss", "data")), ["--inference"], set()),
        (replace(whole, unchecked="--no-self-check"), [], {unchecked}),
    ):
        profile.save("profile.json")
        done = run(*solve, *more)
        assert done.code == 0
        assert {line for line in (untrained, unchecked) if line in done.err} == said
        assert ("launch.sh --epochs" in done.out) is (not profile.lacks and not more), (
            "a run that is possible is proposed"
        )


def test_layers_that_ties_keep_together_are_named(run: Run) -> None:
    decoder(2, tied=True).save(Path("profile.json"))
    given = ("solve", "--cluster", "A", "--servers", "1", *QUICK, "--no-write")
    done = run(*given)
    assert done.code == 0
    assert "'wte' and 'lm_head' have weights or memory in common and stay in one stage with the 7 layers" in done.err
    decoder(2).save(Path("profile.json"))
    assert "in common" not in run(*given).err


LAYERS = "abcdef"
CLUSTER = ("--cluster", "A", "--servers", "1")
"""Four workers: what options do is seen on few as well."""


def _save_six() -> None:
    """A profile of six equal layers, with gradients too large to replicate."""
    Profile(
        layers=tuple(Layer(name, 0.1, 0.2, 10**9, 10**6) for name in LAYERS),
        tensors=tuple(
            Tensor(f"{one}-{other}", one, (other,), 10**4, 10**4) for one, other in itertools.pairwise(LAYERS)
        ),
        minibatch=4,
        model_name="small",
    ).save(Path("profile.json"))


def solved(run: Run, *arguments: str) -> dict[str, Any]:
    _save_six()
    named = () if "--schedule" in arguments else ("--schedule", "1f1b-stashing")
    done = run("solve", *CLUSTER, "--solver", "dp", "--no-write", "--json", *named, *arguments)
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


def stages(document: dict[str, Any]) -> list[str]:
    return ["".join(stage["layers"]) for stage in document["plan"]["stages"]]


def test_layers_may_be_pinned_and_kept_together(run: Run) -> None:
    assert "c" not in stages(solved(run))[0]
    pinned = stages(solved(run, "--pin", "c=1", "--pin", "e=2"))
    assert ("c" in pinned[0], "e" in pinned[1]) == (True, True)
    assert any("bcd" in stage for stage in stages(solved(run, "--together", "b, c", "--together", "c,d")))


def test_staleness_is_a_number_of_updates_or_any(run: Run) -> None:
    _save_six()
    for text, stored in (("0", 0), ("2", 2), ("ANY", None)):
        done = run("solve", *CLUSTER, "--solver", "dp", "--no-write", "--json", "--staleness", text)
        document = json.loads(done.out)
        assert document["choice"]["staleness"] == stored
        assert text == "ANY" or max(document["updates"]["stale_by"]) <= int(text)


PIN = f"solve {' '.join(CLUSTER)} --solver dp --no-write --schedule 1f1b-stashing --ignore-memory --pin "
GIVEN = f"solve {' '.join(CLUSTER)} --solver dp --no-write "
OPTIONS_REFUSED = {
    # Without a limit on memory it is the pins alone that leave no plan, whatever time there is to find out.
    f"{PIN} a": "--pin: expected a layer and a stage from 1 on, as in conv1=1, found 'a'",
    f"{PIN} =1": "--pin: expected",
    f"{PIN} a=0": "a stage from 1 on",
    f"{PIN} a=99": "no plan satisfies the constraints on 4 workers: 'a' is pinned to stage 99, and there can be",
    f"{PIN} a=2 --pin c=1": "'c' is pinned to stage 1 and 'a', which comes before it, to stage 2; relax --pin",
    f"{PIN} a=1 --pin a=2": "'a' is pinned to stage 1 and also to stage 2; relax --pin",
    f"{PIN} a=1 --pin b=2 --together a,b": "and 'b', which must be in the same stage, to stage 2; relax",
    f"{GIVEN} --together a,z": "the profile has no layer 'z'",
    f"{GIVEN} --max-workers 0": "the maximum of workers must be at least 1",
    f"{GIVEN} --max-replicas 0": "the maximum of replicas must be at least 1",
    f"{GIVEN} --inference --schedule gpipe": "--schedule is for training",
    f"{GIVEN} --inference --shard-optimizer": "inference has no optimiser",
    f"{GIVEN} --schedule gpipe --staleness 0": "--staleness chooses among schedules: leave it out with",
    f"{GIVEN} --for megatron --staleness 1": "--staleness chooses among schedules: leave it out with",
    **{f"{GIVEN} --stages '{text}'": "a number or a range" for text in ("two", "", "-3", "1-", "1-2-3", "1.5", "²")},
    **{f"{GIVEN} --stages {text}": "at least 1 stage, and the smaller number first" for text in ("0", "0-2", "4-1")},
    **{f"{GIVEN} --staleness '{text}'": f"or any, found {text!r}" for text in ("some", "-1", "1.5", "", "²")},
}


def test_what_cannot_be_meant_is_one_line(run: Run) -> None:
    _save_six()
    check_refusals(run, OPTIONS_REFUSED)


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


def _save_mixed() -> None:
    """A cluster and a profile in the current folder."""
    Path("mixed.toml").write_text(MIXED)
    replace(chain([(0.1, 0.2, 0.0)] * 9), model_name="chain").save(Path("profile.json"))


def test_a_plan_gives_every_worker_what_it_can_do(run: Run) -> None:
    """And its folder is read by the executor, the simulator and a shell."""
    _save_mixed()
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
    _save_mixed()
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


def test_the_first_servers_can_be_had_alone_and_a_file_is_listed_as_it_was_understood(run: Run) -> None:
    _save_mixed()
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
