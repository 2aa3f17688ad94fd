"""Sweeps: every combination once, answers that do not depend on processes or other points, files that can be read."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.errors import InputError
from pipeplan.planning.settings import Settings
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.sweeps.points import SweepAxes, SweepPoint, sweep_points
from pipeplan.sweeps.rows import SweepRow, hourly_price, pareto_rows, sweep_csv, sweep_json, varying_settings
from pipeplan.sweeps.sweep import LEAST_S, PointAnswer, SharedTime, solve_point, solve_points

DP = Settings(solver="dp", simulate=False)
STASHING = {"schedule": "1f1b-stashing"}
"""A schedule that needs no choice, for tests of other things."""
GIB = 1 << 30


def _profile(saved: int = 1000) -> Profile:
    figures = {"a": (0.01, 0.02, 10**6), "b": (0.01, 0.03, 10**7), "c": (0.02, 0.01, 0)}
    layers = [Layer(name, *own, saved) for name, own in figures.items()]
    return chain(layers, [10**5, 10**4], 4, model_name="small")


def _cluster(servers: int = 2, price: float | None = None) -> Cluster:
    levels = (Level("server", 2, 1e9), Level("cluster", servers, 1e8))
    return Cluster("lab", Device("chip", "cuda", GIB), levels, server_price=price)


def _point(cluster: Cluster, **options: Any) -> SweepPoint:
    return SweepPoint(_profile(), cluster, options=STASHING | options)


def _points(servers: Sequence[int] = (2,), options: Mapping[str, Any] | None = None, **axes: Any) -> list[SweepPoint]:
    return sweep_points(_point(_cluster(), **options or {}), [_cluster(count) for count in servers], SweepAxes(**axes))


def _row(rate: float | None, price: float | None, workers: int = 4) -> SweepRow:
    """A row of a given speed: minibatches have 4 samples."""
    answer = PointAnswer(why="no plan")
    if rate is not None:
        answer = PointAnswer(4 / rate, 1.5, "2-2", "compute of stage 1", 4, "DP")
    return SweepRow(_point(_cluster(workers // 2)), answer, price)


def test_every_combination_comes_once_and_in_order() -> None:
    bandwidths = {"cluster": [1e8, 2e8], "server": [1e9]}
    found = _points((1, 2), bandwidths=bandwidths, memory=[GIB, 2 * GIB], microbatch=[4, 8])
    seen = [(one.cluster.servers, one.bandwidths["cluster"], one.memory_bytes, one.microbatch) for one in found]
    assert len(seen) == len(set(seen)) == 16
    assert seen[:3] == [(1, 1e8, GIB, 4), (1, 1e8, GIB, 8), (1, 1e8, 2 * GIB, 4)]
    assert seen[-1] == (2, 2e8, 2 * GIB, 8)
    varying = varying_settings(SweepRow(point, PointAnswer()) for point in found)
    assert varying == ["servers", "workers", "cluster links", "memory", "microbatch"], "the server links are alike"
    assert _points() == [_point(_cluster())], "a sweep of nothing is the problem itself"
    axes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"bandwidths": {"clutser": [1e8]}}, "cluster lab has no level 'clutser'; did you mean 'cluster'"),
        ({"bandwidths": {"cluster": [0.0]}}, "zero bandwidth"),
        ({"memory": [0]}, "has no memory"),
        ({"schedules": ["1f1b-stashign"]}, "did you mean '1f1b-stashing'"),
        ({"microbatch": range(1, 10_002)}, "10001 combinations are too many"),
    )
    for varied, complaint in axes:
        with pytest.raises(InputError, match=complaint):
            _points(**varied)


def test_a_point_has_an_ideal_an_answer_or_a_reason() -> None:
    point = _point(_cluster(2))
    assert point.ideal_rate == pytest.approx(4 * 4 / 0.1), "all workers computing"
    assert replace(point, options={"inference": True}).ideal_rate == pytest.approx(4 * 4 / 0.04)
    (short,) = _points(memory=[10**6])
    assert "nothing fits in memory: layer 'b' alone needs" in solve_point(short, DP).why
    (narrow,) = _points((1,), {"stages": 3})
    assert "3 stages asked for, but the cluster has only 2 workers" in solve_point(narrow, DP).why
    assert solve_point(point, Settings(solver="both")).proven == "DP+ILP"


def test_what_is_found_does_not_depend_on_the_number_of_processes() -> None:
    grid = _points((1, 2), bandwidths={"cluster": [1e7, 1e9]})
    answers: list[dict[int, PointAnswer]] = [{}, {}]
    for jobs, found in zip((1, 2), answers, strict=True):
        assert solve_points(grid, DP, jobs, found.__setitem__)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 4
    assert all(answer.proven == "DP" for answer in answers[0].values())


def test_the_time_for_all_points_is_shared_by_those_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [100.0], []

    def solved(point: SweepPoint, settings: Settings) -> PointAnswer:
        limits.append(settings.time_limit_s)
        now[0] += (4.0, 1.0, 30.0, 0.0)[len(limits) - 1]
        return PointAnswer()

    monkeypatch.setattr("pipeplan.sweeps.sweep.time.monotonic", lambda: now[0])
    monkeypatch.setattr("pipeplan.sweeps.sweep.solve_point", solved)
    grid = _points(bandwidths={"cluster": [1e6, 1e7, 1e8, 1e9]})
    assert solve_points(grid, DP, 1, lambda *_: None, 20.0)
    assert limits == [20 / 4, 16 / 3, 15 / 2, LEAST_S], "a slow point leaves the rest little"
    now[0] = 100.0
    assert [SharedTime(120.0, 5, 2).for_point(number) for number in range(5)] == [20 / 3, 20 / 2, 20 / 2, 20, 20]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_leaves_what_there_is(jobs: int) -> None:
    found: dict[int, PointAnswer] = {}

    def tell(number: int, answer: PointAnswer) -> None:
        if found:
            raise KeyboardInterrupt
        found[number] = answer

    assert not solve_points(_points(bandwidths={"cluster": [1e7, 1e8, 1e9]}), DP, jobs, tell)
    assert len(found) == 1


def test_an_interrupt_that_a_solver_caught_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def caught(point: SweepPoint, settings: Settings) -> PointAnswer:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return PointAnswer()

    monkeypatch.setattr("pipeplan.sweeps.sweep.solve_point", caught)
    told: list[int] = []
    assert not solve_points(_points(), DP, 1, lambda number, _: told.append(number))
    assert told == [], "what an interrupted solver gives is no answer"


def test_the_pareto_set_is_what_comparing_all_pairs_gives() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rows = [_row(rng.choice([None, 1.0, 2.0, 3.0, 4.0]), rng.choice([None, 1.0, 2.0, 3.0])) for _ in range(8)]
        best, known = pareto_rows(rows), [row for row in rows if row.rate is not None and row.cost is not None]
        for number, row in enumerate(rows):
            beaten = row in known and any(
                one.rate >= row.rate and one.cost <= row.cost and (one.rate, one.cost) != (row.rate, row.cost)
                for one in known
            )
            assert (number in best) == (row.cost is not None and not beaten)


def test_what_a_million_samples_cost() -> None:
    # 100 samples/s take 10,000 s for a million, at 36 an hour.
    assert _row(100.0, 36.0).cost == pytest.approx(100.0)
    assert (_row(100.0, None).cost, _row(None, 36.0).cost) == (None, None)
    point = _point(_cluster(3, price=2.0))
    assert (hourly_price(point, None), hourly_price(point, 5.0)) == (6.0, 15.0)
    assert hourly_price(_point(_cluster(3)), None) is None
    inside = Level("server", 2, 1e9)
    machines = [Server(Device(name, "cuda", GIB), inside, 0.0, price) for name, price in (("a", 1.0), ("b", 2.5))]
    mixed = Cluster.of_servers("mixed", machines, (Level("cluster", 2, 1e8),))
    assert hourly_price(_point(mixed), None) == 3.5


def test_csv_and_json_say_the_same() -> None:
    rows = [_row(100.0, 36.0), _row(None, 36.0)]
    lines = list(csv.DictReader(io.StringIO(sweep_csv(rows))))
    document = sweep_json(rows, planned=3)
    assert (document["format"], document["planned"]) == ("pipeplan-sweep", 3)
    for line, record in zip(lines, document["rows"], strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in record.items()}
    assert lines[0]["samples_per_s"] == "100.0"
    assert lines[0]["bandwidth_cluster_bytes_per_s"] == "100000000.0"
    assert (lines[1]["why"], lines[1]["minibatch_s"]) == ("no plan", "")


# The command.


ROOM = "--cluster A --servers 1,2 --jobs 1"
QUICK = f"{ROOM} --schedule 1f1b-stashing"


def _rows_of(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(Path(path).read_text())))


def test_a_table_of_80_columns_and_files(run: Run) -> None:
    _profile(2 * GIB).save(Path("profile.json"))
    done = run(*f"sweep {QUICK} --memory 1GiB,16GiB --microbatch 4,8 --price 3 --csv out/s.csv".split())
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out + done.err
    assert "Point 1: nothing fits in memory: layer" in done.out
    assert "no other point is both as fast and as cheap" in done.out
    lines = _rows_of("out/s.csv")
    assert [line["workers"] for line in lines] == ["4"] * 4 + ["8"] * 4
    assert {line["pareto"] for line in lines if line["minibatch_s"]} <= {"True", "False"}
    assert "True" in {line["pareto"] for line in lines}
    assert done.err.splitlines()[-1] == "written: out/s.csv"


def test_without_a_schedule_every_point_has_the_plan_of_a_solve(run: Run) -> None:
    ways, swept = ("mnist-v100", "--cluster", "C", "--microbatch", "8"), ("--jobs", "1", "--csv", "made.csv")
    done = run("sweep", *ways, "--servers", "2", "--staleness", "any", *swept)
    assert "Point 1: asynchronous (" in done.out
    assert "the plan has minibatches" not in done.out, "that size was asked for"
    assert _rows_of("made.csv")[0]["synchronous"] == "False"
    assert run("sweep", *ways, "--servers", "4", *swept).code == 0
    (row,) = _rows_of("made.csv")
    assert row["synchronous"] == "True"
    solved = json.loads(run("solve", *ways, "--servers", "4", "--solver", "dp", "--no-write", "--json").out)
    stated = solved["plan"]["config"], solved["stated"]["minibatch_s"]
    assert (row["config"], float(row["minibatch_s"])) == stated
    _profile(40 * GIB).save(Path("profile.json"))
    asked = ["sweep", "--cluster", "A", "--servers", "1", "--jobs", "1"]
    assert "Point 1: the plan has microbatches of 1." in run(*asked).out, "a smaller one that was chosen"
    (found,) = json.loads(run(*asked, "--json").out)["rows"]
    assert found["minibatch"] == 1
    assert found["samples_per_s"] == pytest.approx(1 / found["minibatch_s"])


def test_files_of_a_sweep_are_replaced_and_others_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _profile().save(Path("profile.json"))
    asked = ("sweep", *QUICK.split())
    for _ in range(2):
        assert run(*asked, "--csv", "new/made.csv").code == 0
    Path("notes").write_text("mine")

    def search(*_arguments: object, **_named: object) -> None:
        raise AssertionError("a search began")

    with monkeypatch.context() as patched:
        patched.setattr("pipeplan.cli.commands.sweep.solve_points", search)
        for files, says in (
            ("notes", "notes exists and is not the table of a sweep: give another file with --csv, or --force"),
            ("notes/made.csv", "cannot write notes/made.csv: Not a directory"),
        ):
            done = run(*asked, "--csv", files)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
            assert says in done.err
    assert Path("notes").read_text() == "mine"
    assert run(*asked, "--csv", "notes", "--force").code == 0
    assert Path("notes").read_text().startswith("servers,")


def test_json_and_no_price(run: Run) -> None:
    _profile().save(Path("profile.json"))

    def rows(options: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(run("sweep", *shlex.split(options), "--json").out)["rows"]
        return found

    found = rows(f"{QUICK} --bandwidth 'cluster=10Gbit/s,25 Gbit/s'")
    assert [row["bandwidth_cluster_bytes_per_s"] for row in found] == [1.25e9, 3.125e9] * 2
    assert {row["cost_per_million_samples"] for row in found} == {None}
    assert {row["proven"] for row in found} == {"DP"}
    assert len(rows(f"{QUICK} --memory '1GiB,1 GiB'")) == 2, "the same value twice is one point"
    assert [row["workers"] for row in rows("--workers 1,2,3 --jobs 1")] == [1, 2, 3]


def test_what_cannot_be_used_gets_one_line(run: Run) -> None:
    _profile().save(Path("profile.json"))
    for arguments, complaint in (
        ("--servers one", "--servers: expected whole numbers such as 1,2,4, found 'one'"),
        ("--servers 0", "cannot have 0 servers"),
        ("--bandwidth 10Gbit/s", "expected a level and its rates"),
        ("--bandwidth cluster=fast", "--bandwidth cluster: expected a rate"),
        ("--bandwidth cluster=1Gbit/s --bandwidth cluster=2Gbit/s", "named twice"),
        ("--memory 8", "--memory: expected a size such as '16 GB', found '8'"),
        ("--microbatch 4,,8", "--microbatch: expected whole numbers such as 1,2,4, found ''"),
        ("--schedule 1f1b-stashing --inference", "--schedule is for training"),
        ("--batch 0", "--batch must be at least 1"),
        ("--time-limit 0", "--time-limit must be above 0"),
        ("--workers 2", "--workers goes with --cluster local"),
        ("--price -1", "'--price'"),
    ):
        done = run("sweep", "--cluster", "A", "--jobs", "1", "--csv", "made.csv", *arguments.split())
        assert (done.code, done.out) == (2, ""), arguments
        assert complaint in done.err.splitlines()[-1]
        assert not Path("made.csv").exists()
