"""Searches in other processes: the same answer for any number of them, and none is left behind."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from long_chains import long_chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InfeasibleError
from pipeplan.planning import baselines, beside
from pipeplan.planning.beside import SideSearches, side_searches
from pipeplan.planning.reuse import reusing
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import NO_DEADLINE

SEARCHES = baselines.straight_pipelines, baselines.uniform_baselines


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes are started for small problems too; the numbers of processes that were asked for."""
    asked: list[int] = []
    start = SideSearches.start

    def started(self: SideSearches, *arguments: Any) -> None:
        asked.append(self._processes)
        start(self, *arguments)

    monkeypatch.setattr(beside, "LEAST_CELLS", 0)
    monkeypatch.setattr(SideSearches, "start", started)
    return asked


def _problem(memory: int = 16 * 2**30) -> Problem:
    levels = (Level("server", 2, 1e10), Level("cluster", 2, 1e9))
    return Problem(long_chain(6), Cluster("small", Device("chip", "cuda", memory), levels), Options(recompute=False))


def _without_seconds(value: Any) -> Any:
    """A document without measured seconds, but with the names of the phases in their order."""
    if isinstance(value, list):
        return [_without_seconds(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_seconds(one) for key, one in value.items() if key != "seconds"}
    return kept | ({"seconds": list(value["seconds"])} if isinstance(value.get("seconds"), dict) else {})


def test_the_plan_file_is_the_same_for_any_number_of_processes(run: Run, begun: list[int]) -> None:
    texts = []
    for jobs in ("1", "3"):
        folder = f"plan-{jobs}"
        done = run("solve", "mnist-v100", "--cluster", "A", "--servers", "1", "--jobs", jobs, "-o", folder)
        assert done.code == 0, done.err
        texts.append(json.dumps(_without_seconds(json.loads(Path(folder, "plan.json").read_text())), indent=1))
    assert begun == [2], "one job needs no other process"
    assert texts[0] == texts[1]
    assert "best straight pipeline" in texts[0]
    assert multiprocessing.active_children() == []


def test_a_process_finds_the_same_baselines(monkeypatch: pytest.MonkeyPatch, begun: list[int]) -> None:
    problem = _problem()
    cuts = enumerate_cuts(problem, 1000)
    here = [search(problem, cuts, NO_DEADLINE) for search in SEARCHES]
    with side_searches(problem, cuts, 2) as sides:
        assert sides is not None
        sides.start(SEARCHES, NO_DEADLINE, 0.8)
        _wait_until(lambda: len(sides._futures) == len(SEARCHES))
        # From here on a search in this process would fail.
        monkeypatch.setattr(beside._Task, "run", None)
        assert [sides.found(search) for search in SEARCHES] == here
    assert multiprocessing.active_children() == []


def test_a_search_that_no_process_has_begun_is_made_here(monkeypatch: pytest.MonkeyPatch, begun: list[int]) -> None:
    problem = _problem()
    cuts = enumerate_cuts(problem, 1000)
    monkeypatch.setattr(SideSearches, "_go_on", lambda self, done: None)
    with side_searches(problem, cuts, 2) as sides:
        assert sides is not None
        sides.start(SEARCHES, NO_DEADLINE, 0.8)
        assert sides.found(SEARCHES[0]) == SEARCHES[0](problem, cuts, NO_DEADLINE)
    assert multiprocessing.active_children() == []


def test_a_search_whose_process_is_killed_is_made_here(begun: list[int]) -> None:
    problem = _problem()
    cuts = enumerate_cuts(problem, 1000)
    with side_searches(problem, cuts, 2) as sides:
        assert sides is not None
        sides.start(SEARCHES, NO_DEADLINE, 0.8)
        for process in multiprocessing.active_children():
            process.kill()
        for search in SEARCHES:
            assert sides.found(search) == search(problem, cuts, NO_DEADLINE)


@pytest.mark.parametrize("error", [KeyboardInterrupt, InfeasibleError])
def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, begun: list[int], error: type[BaseException]) -> None:
    def stopped(*_: object) -> None:
        raise error

    monkeypatch.setattr("pipeplan.planning.solve.run_solvers", stopped)
    with pytest.raises(error):
        solve(_problem(), Settings(jobs=2))
    assert begun == [1]
    assert multiprocessing.active_children() == []


def test_small_problems_and_searches_that_reuse_answers_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem()
    cuts = enumerate_cuts(problem, 1000)
    cells = len(cuts.ideals) * 4
    for least, expected in ((cells + 1, True), (cells, False)):
        monkeypatch.setattr(beside, "LEAST_CELLS", least)
        with side_searches(problem, cuts, 2) as sides:
            assert (sides is None) == expected
    with reusing(), side_searches(problem, cuts, 2) as sides:
        assert sides is None


@pytest.mark.parametrize("jobs", ["0", "-1", "x"])
def test_a_number_of_processes_is_at_least_one(run: Run, jobs: str) -> None:
    done = run("solve", "mnist-v100", "--cluster", "C", "--jobs", jobs)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert "--jobs" in done.err
    assert list(Path().iterdir()) == []


def _wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("no process took the searches")
