"""Problems: contradicting options are refused, units and cuts are derived once, and plan.json has one reader."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from checking import QUICK, Document, changed, fault, written
from instances import drawn, mixed_instance, roomy, to_problem
from long_chains import calls_of, chain, long_chain
from reported import branching, small_cluster

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.drawing.answer import answer_lines
from pipeplan.errors import InputError
from pipeplan.planning.fast import MANY_CUTS, best_in_time, best_plan
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.solve import solve
from pipeplan.problem.blocks import block_cuts, repeated_regions
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.plan_file import BatchTime, PlanFile
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.report.source import read_report_source
from pipeplan.solvers.dp.cut_selection import prune_cuts
from pipeplan.util.deadline import NO_DEADLINE
from pipeplan.util.files import Node


def _chain_problem(layers: int, options: Options | None = None) -> Problem:
    return Problem(long_chain(layers), pipeplan.cluster("A"), options or Options())


def test_the_units_do_not_depend_on_the_cluster_or_on_most_options() -> None:
    problem = _chain_problem(6)
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
    assert Options(stages=2, max_stages=2).stages == 2
    with pytest.raises(InputError, match="3 stages asked for, and at most 2"):
        Options(stages=3, max_stages=2)


def test_deriving_a_problem_takes_work_in_proportion_to_its_layers() -> None:
    """A chain of 1,000 layers is derived hundreds of times to explain one plan."""
    cluster = pipeplan.cluster("A")

    def calls(layers: int) -> int:
        profile = long_chain(layers)
        return calls_of(lambda: Problem(replace(profile, minibatch=2), cluster))

    assert calls(400) < 2.2 * calls(200)


# Cuts.


def test_one_stage_has_the_empty_and_the_full_cut_alone() -> None:
    every = enumerate_cuts(_chain_problem(6), 100)
    for options in (Options(stages=1), Options(max_stages=1)):
        cuts = enumerate_cuts(_chain_problem(6, options), 1)
        assert cuts.complete
        assert cuts.ideals == (every.ideals[0], every.ideals[-1])


def test_cuts_with_other_times_are_those_listed_anew() -> None:
    for seed in range(6):
        problem = to_problem(mixed_instance(seed, layers=7))
        cuts = enumerate_cuts(problem, 1000)
        layers = tuple(replace(layer, forward_s=layer.forward_s * 3 + 1) for layer in problem.profile.layers)
        other = replace(problem, profile=replace(problem.profile, layers=layers))
        retimed, listed = cuts.retimed(other), enumerate_cuts(other, 1000)
        assert retimed.ideals == listed.ideals
        for name in ("work_s", "forward_s", "parameters", "sent", "returned"):
            assert np.array_equal(getattr(retimed, name), getattr(listed, name)), name
        assert not np.array_equal(retimed.work_s, cuts.work_s)


# The largest workspace between two cuts, against the maximum over the layers between them, one pair at a time.


def _with_workspaces(layers: int, *sizes: int) -> Problem:
    """A chain whose layers have these workspaces in turn."""
    profile = long_chain(layers)
    made = (replace(layer, workspace_bytes=sizes[n % len(sizes)]) for n, layer in enumerate(profile.layers))
    return replace(_chain_problem(layers), profile=replace(profile, layers=tuple(made)))


def _compare_workspaces(problem: Problem, cuts: Cuts) -> int:
    """Compare all pairs of cuts, with one end for all and with an end for each; returns how many there are."""
    pairs = [(start, end) for end in range(len(cuts.ideals)) for start in cuts.smaller(end).tolist()]
    expected = [max(problem.units[unit].workspace_bytes for unit in cuts.members(*pair)) for pair in pairs]
    starts, ends = np.array(pairs, dtype=np.intp).T
    assert cuts.workspaces.between(ends, starts).tolist() == expected
    for end in range(1, len(cuts.ideals)):
        mine = np.flatnonzero(ends == end)
        assert cuts.workspaces.between(end, starts[mine]).tolist() == [expected[index] for index in mine]
    return len(pairs)


def test_workspaces_in_chains_and_graphs_that_branch() -> None:
    for count in (1, 2, 3, 8, 33, 130):  # also more layers than bits of a word
        rng = random.Random(count)
        problem = _with_workspaces(count, *(rng.choice((0, 5, 9, 30)) for _ in range(count)))
        cuts = enumerate_cuts(problem, 1000)
        assert cuts.chain
        assert _compare_workspaces(problem, cuts) == count * (count + 1) / 2
        kept = np.ones(count + 1, dtype=bool)
        kept[2:-1:2] = False
        _compare_workspaces(problem, cuts.only(kept))
    found = replace(cuts.workspaces, ranges=cuts.workspaces.ranges[:0])
    sizes = [layer.workspace_bytes for layer in problem.profile.layers]
    assert found.between(130, np.arange(130)).tolist() == [max(sizes[start:]) for start in range(130)]
    branching = 0
    for seed in range(20):
        _, problem = drawn(seed, lambda one: roomy(mixed_instance(one), one))
        cuts = enumerate_cuts(problem, 1000)
        branching += not cuts.chain
        assert _compare_workspaces(problem, cuts) > 0
    assert branching > 5


def test_a_profile_without_workspaces_needs_no_table_and_inference_none() -> None:
    found = enumerate_cuts(_chain_problem(5), 100).workspaces
    assert found.ranges.size == found.masks.size == 0
    assert found.between(5, np.arange(3)).tolist() == [0.0] * 3
    forward = replace(_with_workspaces(5, 9), options=Options(inference=True))
    assert all(unit.workspace_bytes == 0 for unit in forward.units)
    # A layer that costs only its workspace may not move over a cut.
    for size, cuts_left in ((0, 4), (9, 5)):
        problem = _with_workspaces(4, 0, size, 0, 0)
        first, second, *rest = problem.profile.layers
        free = replace(second, forward_s=0.0, backward_s=0.0, update_s=0.0, parameter_bytes=0, saved_bytes=0)
        problem = replace(problem, profile=replace(problem.profile, layers=(first, free, *rest)))
        assert len(prune_cuts(problem, enumerate_cuts(problem, 100)).ideals) == cuts_left


# Repeated blocks.

INSIDE = 6
"""Layers of a block: a norm, two branches of two layers that an addition joins, with a bypass."""


def _transformer(blocks: int, *, spread: float = 0.0, memory: int = 10**9) -> Problem:
    """An embedding, equal blocks whose measured times differ by up to `spread`, and a head, on eight workers."""
    layers, tensors, last = [Layer("embedding", 0.5, 1.0, 5000, 10)], list[Tensor](), "embedding"
    for block in range(blocks):
        names = [f"layers.{block}.{part}" for part in ("norm", "q", "k", "mix", "out", "add")]
        late = 1 + spread * ((block * 7) % 5) / 4
        layers += [
            Layer(name, time * late, 2 * time * late, 100 * part, 20 + part)
            for part, (name, time) in enumerate(zip(names, (0.1, 1.0, 1.0, 0.5, 2.0, 0.1), strict=True))
        ]
        norm, query, key, mix, out, add = names
        readers = {last: (norm, add), norm: (query, key), query: (mix,), key: (mix,), mix: (out,), out: (add,)}
        tensors += [Tensor(f"of {source}", source, targets, 100, 100) for source, targets in readers.items()]
        last = add
    layers.append(Layer("head", 1.0, 2.0, 5000, 10))
    profile = Profile(tuple(layers), (*tensors, Tensor(f"of {last}", last, ("head",), 100, 100)), 1)
    levels = (Level("server", 4, 1e4), Level("cluster", 2, 1e3))
    options = Options(schedule="1f1b-flush", accumulate=64)
    return Problem(profile, Cluster("eight", Device("chip", "cuda", memory), levels), options)


def test_blocks_are_found_whatever_their_measured_times() -> None:
    for spread in (0.0, 0.2):
        ((start, stop, period),) = repeated_regions(_transformer(20, spread=spread).units)
        assert period == INSIDE
        assert stop - start >= 19 * INSIDE
    alike = chain([Layer(f"l{i}", 1.0, 2.0, 10 + i * i, i) for i in range(40)], 10)
    problem = replace(_transformer(3), profile=alike)
    assert block_cuts(problem, enumerate_cuts(problem, 1000)) is None, "a model without blocks has none"


@pytest.mark.parametrize("memory", [10**9, 25_000])
def test_a_search_between_blocks_is_near_the_best_plan(memory: int) -> None:
    problem = _transformer(16, spread=0.1, memory=memory)
    cuts = enumerate_cuts(problem, 10_000)
    assert len(cuts.ideals) > MANY_CUTS
    exact = best_plan(problem, cuts)
    found, searched_all = best_in_time(problem, 10_000, NO_DEADLINE, 0.01)
    assert not searched_all, "the plans between blocks stand for all"
    assert exact.step_time_s <= found.step_time_s * (1 + 1e-9)
    assert found.step_time_s <= exact.step_time_s * 1.02
    assert found.bound_s <= exact.step_time_s * (1 + 1e-9), "the bound holds for all plans"


# plan.json.


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Data parallelism under a flush, one microbatch a worker."""
    options = Options(schedule="1f1b-flush", accumulate=4, stages=1)
    return solve(Problem(branching(4), small_cluster(), options), QUICK)


def test_the_cause_of_data_parallelism_is_compute_or_the_exchange() -> None:
    batch = BatchTime(4, 1.0, 0.0, 0.5, 1.2, "compute of stage 1")
    assert batch.cause(1) == "compute of stage 1"
    assert replace(batch, exposed_s=2.0).cause(1) == "gradient synchronisation"
    assert replace(batch, exposed_s=0.8).cause(2) == "filling and draining the pipeline"


def test_screen_report_and_check_name_one_cause(outcome: Outcome) -> None:
    document, profile = written(outcome), outcome.problem.profile
    batch, cause = outcome.evaluation.batch, document["prediction"]["bound_by"]
    assert batch.steady_s == 0, "the first microbatch is the only one"
    assert cause in ("compute of stage 1", "gradient synchronisation")
    assert read_report_source(Node(document, "plan.json"), profile).bound == cause
    assert any(line.startswith(f"WHY   bound by {cause}") for line in answer_lines(outcome, 100))
    assert fault(document, profile) == ""
    for other in ("filling and draining the pipeline", "waiting for other stages between passes"):
        forged = changed(document, lambda d: d["prediction"].update(bound_by=other))  # noqa: B023
        assert "bound_by" in fault(forged, profile)


def test_a_wrong_field_is_named(outcome: Outcome) -> None:
    changes: tuple[tuple[Callable[[Document], object], str], ...] = (
        (lambda d: d["plan"].update(schedule="forward-only"), "plan: schedule: there is no such schedule for training"),
        (lambda d: d["plan"]["stages"][0].update(depth=0), "plan: stages[0]: depth: expected at least 1"),
        (lambda d: d["prediction"]["stages"].clear(), "prediction: stages: expected 1, one for each stage, found 0"),
        (lambda d: d["prediction"]["stages"][0].pop("sync_s"), "prediction: stages[0]: the field 'sync_s' is missing"),
        (lambda d: d["stated"].update(minibatch_s=0.0), "stated: minibatch_s: expected more than 0"),
        (lambda d: d["profile"].update(minibatch=0), "profile: minibatch: expected at least 1"),
        (lambda d: d["cluster"].pop("levels"), "cluster: the field 'levels' is missing"),
        (lambda d: d["prediction"]["stages"][0].update(forward_s=-1.0), "forward_s: expected at least 0, found -1"),
        (lambda d: d["prediction"]["stages"][0].update(forward_s=1e308), "at most 9.2"),
        (lambda d: d["options"].update(overlap=2), "the overlap must lie between 0 and 1"),
    )
    for change, place in changes:
        with pytest.raises(InputError) as error:
            PlanFile.of(Node(changed(written(outcome), change), "plan.json"))
        assert str(error.value).startswith("plan.json: ")
        assert place in str(error.value)
