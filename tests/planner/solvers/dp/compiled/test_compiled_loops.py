"""The loops that numba compiles find what the array code finds, bit by bit, compiled and as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from extents import slow_but_for
from long_chains import long_chain
from repository import ROOT

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchEffort, SearchLimits
from pipeplan.solvers.dp.compiled import availability
from pipeplan.solvers.dp.steady import uniform_search
from pipeplan.solvers.dp.steady.uniform_search import UniformSearch
from pipeplan.solvers.dp.terms.cost_terms import CostTerms

pytest.importorskip("numba")

SCRIPT = ROOT / "tests" / "support" / "compared_searches.py"


def _compared(what: str, first: int, end: int, **environment: str) -> int:
    """Compare in a process of its own. Returns how much was compared."""
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(first), str(end), what],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.parametrize("first", slow_but_for([0], range(0, 600, 30)))
def test_loops_find_the_states_of_array_code_in_small_graphs(first: int) -> None:
    assert _compared("graphs", first, first + 30, NUMBA_DISABLE_JIT="1") > 100


@pytest.mark.parametrize("what", ["flush", "vertical"])
@pytest.mark.parametrize("first", slow_but_for([0], range(0, 400, 10)))
def test_loops_find_the_states_of_array_code_under_other_schedules(what: str, first: int) -> None:
    assert _compared(what, first, first + 10, NUMBA_DISABLE_JIT="1") > 20


@pytest.mark.parametrize("first", slow_but_for([0], range(0, 300, 15)))
def test_loops_alone_find_the_plan_that_brute_force_finds(first: int) -> None:
    assert _compared("answers", first, first + 15, NUMBA_DISABLE_JIT="1") > 3


_COMPILED = {"chains": 2, "graphs": 200, "answers": 40, "flush": 200, "vertical": 200}


@pytest.mark.parametrize("what", slow_but_for(["chains"], [*_COMPILED]))
def test_compiled_loops_find_the_states_of_array_code(what: str) -> None:
    assert _compared(what, 0, _COMPILED[what]) > 20


def test_compiled_code_is_kept_where_that_is_possible_and_not_needed(tmp_path: Path) -> None:
    """Below a file no folder can be made."""
    (tmp_path / "file").touch()
    assert availability.is_writable(tmp_path / "new" / "folder")
    assert not availability.is_writable(tmp_path / "file" / "folder")
    assert _compared("graphs", 1, 2, NUMBA_DISABLE_JIT="1", XDG_CACHE_HOME=str(tmp_path / "file")) >= 0


def test_loops_are_loaded_for_long_searches_and_compiled_for_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, on_disk, due in (
        (False, False, [False, False, False]),
        (True, False, [False, False, True]),
        (True, True, [False, True, True]),
    ):
        monkeypatch.setattr(availability, "has_numba", lambda installed=installed: installed)
        monkeypatch.setattr(
            availability, "are_compiled", lambda loops, on_disk=on_disk: on_disk and loops == availability.STEADY
        )
        monkeypatch.setattr(availability, "_in_use", set())
        works = (1.0, availability.LONG, availability.VERY_LONG)
        assert [availability.are_loops_due(work, availability.STEADY) for work in works] == due
        assert [availability.are_loops_due(work, availability.BATCHES) for work in works] == [False, False, installed]
        assert availability.are_loops_due(1.0, availability.STEADY) == installed, "what is loaded stays in use"


@pytest.mark.parametrize(
    ("most", "done", "ahead", "asked"),
    [
        (float("inf"), 5.0, 100.0, [105.0]),
        (float("inf"), 5.0, 0.0, [5.0 + 3**2 / 2]),
        (float("inf"), 0.0, 100.0, [0.0]),
        (1e9, 5.0, 100.0, []),
    ],
)
def test_a_search_asks_for_loops_by_the_work_so_far_and_ahead_unless_its_effort_is_limited(
    most: float, done: float, ahead: float, asked: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(uniform_search, "are_loops_due", lambda work, loops: told.append(work))
    cluster = Cluster("c", Device("d", "cuda", 1 << 30), (Level("server", 2, 1e10, 0.0),))
    problem = Problem(long_chain(3), cluster, Options(contention=False))
    effort = SearchEffort(most, array_work=done, array_work_ahead=ahead)
    search = UniformSearch(
        CostTerms(problem, enumerate_cuts(problem, 10)), 100.0, SearchLimits(memory=False, effort=effort)
    )
    assert search.run() is not None
    assert told == asked


@pytest.mark.parametrize("error", ["ImportError('numba does not know this NumPy')", "errors.TypingError('a type')"])
def test_array_code_does_the_work_where_loops_fail(error: str) -> None:
    """In a process of its own, which never uses loops again."""
    code = f"""
from numba.core import errors
from pipeplan.planning.settings import MAXIMUM_CUTS
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.compiled import availability, compiled_search
from instances import random_instance, to_problem

def fail(search):
    raise {error}

problem = to_problem(random_instance(3))
cuts = enumerate_cuts(problem, MAXIMUM_CUTS)
before = dynamic_program.solve(problem, cuts)
availability.LONG = availability.VERY_LONG = 0
compiled_search.kept_states = fail
assert availability.are_loops_due(0.0, availability.STEADY)
after = dynamic_program.solve(problem, cuts)
assert after.plan == before.plan and after.status == before.status
assert not availability.are_loops_due(1e9, availability.STEADY)
"""
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_name_of_the_code_folder_follows_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = availability.code_folder.__wrapped__()
    assert before.parent == tmp_path / "pipeplan" / "compiled"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    assert availability.code_folder.__wrapped__() != before


def test_the_command_line_does_not_import_numba() -> None:
    code = "import sys, pipeplan.cli.planning.solve, pipeplan.solvers.dp.dynamic_program; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_small_problems_are_solved_without_numba() -> None:
    code = """
import sys
from instances import drawn, mixed_instance
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.compiled import availability
availability.are_compiled = lambda loops: True
for schedule in ("1f1b-stashing", "vertical-sync", "1f1b-flush", "gpipe"):
    _, problem = drawn(5, lambda one: mixed_instance(one, layers=5, schedule=schedule))
    dynamic_program.solve(problem, enumerate_cuts(problem, 1000))
print("numba" in sys.modules)
"""
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
