"""Problems: options that contradict each other are refused where they are made, and units are derived once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from instances import mixed_instance, to_problem
from long_chains import calls_of, long_chain

import pipeplan
from pipeplan.errors import InputError
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem


def test_a_number_of_stages_must_be_within_their_maximum() -> None:
    assert Options(stages=2, max_stages=2).stages == 2
    with pytest.raises(InputError, match="3 stages asked for, and at most 2"):
        Options(stages=3, max_stages=2)


def test_the_units_do_not_depend_on_the_cluster_or_on_most_options() -> None:
    problem = Problem(long_chain(6), pipeplan.cluster("A"))
    for same in (
        problem.within(pipeplan.cluster("B")),
        problem.straight(),
        replace(problem, options=Options(memory=False, stages=2)),
    ):
        assert (same.units, same.flows) == (problem.units, problem.flows)
        assert same.units is problem.units
    joined = replace(problem, options=Options(no_cut_after=("l2",)))
    assert [unit.layers for unit in joined.units] == [("l0",), ("l1",), ("l2", "l3"), ("l4",), ("l5",)]
    assert replace(problem, options=Options(inference=True)).units[0].backward_s == 0
    with pytest.raises(InputError, match="no layer 'l9'"):
        replace(problem, options=Options(pins=(("l9", 1),)))
    with pytest.raises(InputError, match="the cluster has only 4 workers"):
        replace(problem, options=Options(stages=5)).within(pipeplan.cluster("C"))


def test_deriving_a_problem_takes_work_in_proportion_to_its_layers() -> None:
    """A chain of 1,000 layers is derived hundreds of times to explain one plan."""
    cluster = pipeplan.cluster("A")

    def calls(layers: int) -> int:
        profile = long_chain(layers)
        return calls_of(lambda: Problem(replace(profile, minibatch=2), cluster))

    assert calls(400) < 2.2 * calls(200)


def test_one_stage_has_the_empty_and_the_full_cut_alone() -> None:
    problem = Problem(long_chain(6), pipeplan.cluster("A"), Options(stages=1))
    every = enumerate_cuts(replace(problem, options=Options()), 100)
    cuts = enumerate_cuts(problem, 1)
    assert cuts.complete
    assert cuts.ideals == (every.ideals[0], every.ideals[-1])
    assert enumerate_cuts(replace(problem, options=Options(max_stages=1)), 1).ideals == cuts.ideals


@pytest.mark.parametrize("seed", range(6))
def test_cuts_with_other_times_are_those_listed_anew(seed: int) -> None:
    problem = to_problem(mixed_instance(seed, layers=7))
    cuts = enumerate_cuts(problem, 1000)
    layers = tuple(replace(layer, forward_s=layer.forward_s * 3 + 1) for layer in problem.profile.layers)
    other = replace(problem, profile=replace(problem.profile, layers=layers))
    retimed, listed = cuts.retimed(other), enumerate_cuts(other, 1000)
    assert retimed.ideals == listed.ideals
    for name in ("work_s", "forward_s", "parameters", "sent", "returned"):
        assert np.array_equal(getattr(retimed, name), getattr(listed, name)), name
    assert not np.array_equal(retimed.work_s, cuts.work_s)


def test_neighbouring_cuts_of_a_chain_are_found_without_a_search() -> None:
    problem = Problem(long_chain(9), pipeplan.cluster("A"))
    whole = enumerate_cuts(problem, 1000)
    for cuts in (whole, whole.only(np.array([number not in (3, 4) for number in range(10)]))):
        assert cuts.chain
        for quick, searched in zip(cuts._pairs_in_a_row, Cuts._pairs.fget(cuts), strict=True):  # type: ignore[attr-defined]
            assert quick.tolist() == searched.tolist()
