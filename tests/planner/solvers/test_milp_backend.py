"""HiGHS inside this process: where it stops, what Ctrl-C leaves, and that it prints nothing."""

from __future__ import annotations

import _thread
import math
import random
import subprocess
import sys
import threading

import pulp
import pytest

from pipeplan.solvers.ilp import backend
from pipeplan.solvers.ilp.backend import new_variable


def slow_program() -> pulp.LpProblem:
    """A program with solutions at hand whose proof takes HiGHS hours: the market split of Cornuéjols and Dawande."""
    rng = random.Random(1)
    program = pulp.LpProblem("split", pulp.LpMinimize)
    take = [new_variable(program, f"x{i}", 0, 1, pulp.LpInteger) for i in range(50)]
    errors = []
    for row in range(6):
        weights = [rng.randrange(100) for _ in take]
        over, under = new_variable(program, f"o{row}", 0), new_variable(program, f"u{row}", 0)
        errors += [over, under]
        program += pulp.lpSum(w * x for w, x in zip(weights, take, strict=True)) + under - over == sum(weights) // 2
    program.setObjective(pulp.lpSum(errors))
    return program


def test_ctrl_c_gives_the_best_so_far_with_its_bound() -> None:
    program = slow_program()
    timer = threading.Timer(1.0, _thread.interrupt_main)
    timer.start()
    try:
        answer = backend.run(program, 60.0, 0.0)
    finally:
        timer.cancel()
    assert answer.interrupted
    assert answer.found
    assert not answer.proven
    objective = program.objective
    value = objective.value()
    assert value is not None
    assert 0 <= answer.bound < value


def test_a_solver_that_does_not_stop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_GRACE_S", 0.1)
    ended = threading.Event()

    class Deaf:
        """A model of highspy that is in presolve."""

        def run(self) -> None:
            ended.wait(30)

        def cancelSolve(self) -> None:
            pass

    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    try:
        with pytest.raises(backend._AbandonedError):
            backend._Interruptible(math.inf).run(Deaf())
    finally:
        timer.cancel()
        ended.set()


_ONE_PROGRAM = """
import pulp
from pipeplan.solvers.ilp import backend
program = pulp.LpProblem("one", pulp.LpMinimize)
x = pulp.LpVariable("x", 2, 5, cat="Integer")
program += x
program += x >= 2.5
assert backend.run(program, None, 0.0).proven
print("done")
"""


def test_the_solver_prints_nothing() -> None:
    """The banner of highspy 1.16 would come before what `solve --json` prints."""
    done = subprocess.run([sys.executable, "-c", _ONE_PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"


def test_a_search_that_ends_before_its_first_solution_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_values(*_: object) -> None:
        [][0]  # what PuLP does where HiGHS has no values, if its time is up early

    monkeypatch.setattr(pulp.HiGHS, "findSolutionValues", no_values)
    program = pulp.LpProblem()
    choice = pulp.LpVariable("choice", 0, 1, cat="Integer")
    program += choice
    program += choice >= 1
    assert backend.run(program, 5.0, 0.0).proven
