"""The choice of a plan (one global batch, one figure, one tolerance) and of the order of servers that differ."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from brute_force import best
from extents import slow_but_for
from instances import drawn, random_instance, unequal_instance

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.from_options.choose_order import choose_order, distinct_orders, in_order
from pipeplan.from_options.option_fields import options_for
from pipeplan.planning import candidate_search
from pipeplan.planning.candidate_search import DDP, ONE_SERVER, PIPELINE, UNIFORM, ZERO_1
from pipeplan.planning.candidates import Candidate
from pipeplan.planning.choose import Choice, choose
from pipeplan.planning.figure import TOLERANCE, Figure
from pipeplan.planning.local_search import PlanSearch
from pipeplan.planning.question import ANY, Machines, Question, sizes_for
from pipeplan.problem.options import Sharding
from pipeplan.profile_data.profile import Size
from pipeplan.util.deadline import Deadline


@cache
def _choice(name: str, cluster: str, batch: int | None = None, staleness: float = 0, **options: object) -> Choice:
    machines = Machines(pipeplan.read_profile(name), pipeplan.cluster(cluster))
    return choose(Question(machines, options_for("cuda", **options), batch, staleness=staleness))


def _batches(choice: Choice) -> set[int]:
    return {(one.plan.accumulate or 0) * one.problem.profile.minibatch for one in choice.rivals}


@pytest.mark.parametrize("name", ["mnist-v100", "resnet50-v100", "awd-lm-v100"])
@pytest.mark.parametrize("cluster", slow_but_for("C", "ABC"))
def test_of_candidates_with_the_same_global_batch_none_is_faster_beyond_the_tolerance(name: str, cluster: str) -> None:
    choice = _choice(name, cluster)
    assert choice.assumed
    assert choice.samples == pipeplan.cluster(cluster).workers * pipeplan.read_profile(name).minibatch
    assert _batches(choice) == {choice.samples}
    assert choice.taken in choice.rivals
    assert choice.taken.sample_s <= min(one.sample_s for one in choice.rivals) * (1 + TOLERANCE)
    assert choice.proven.sample_s <= min(one.sample_s for one in choice.rivals) * (1 + 1e-9)
    assert all(one.delay == 0 for one in choice.rivals), "no gradient is old unless the question allows it"
    larger = _choice(name, cluster, 4 * choice.samples)
    assert _batches(larger) == {4 * choice.samples}
    assert not larger.assumed


def test_rivals_are_those_that_a_user_would_run() -> None:
    found = {one.kind: one for one in _choice("vgg16-v100", "B").rivals}
    assert {DDP, ZERO_1, ONE_SERVER, UNIFORM} <= found.keys()
    assert len(found[DDP].plan.stages) == 1
    assert found[ZERO_1].sharding == Sharding.OPTIMIZER
    assert found[ONE_SERVER].plan.busy <= 8
    assert len({stage.replicas for stage in found[UNIFORM].plan.stages}) == 1


@pytest.mark.slow
def test_old_gradients_are_taken_only_up_to_the_delay_that_is_allowed() -> None:
    never = _choice("vgg16-v100", "A")
    assert never.taken.delay == 0
    assert never.stale is not None, "what they would gain is told in any case"
    assert never.stale.sample_s * (1 + TOLERANCE) < never.taken.sample_s
    one = _choice("vgg16-v100", "A", staleness=1)
    assert one.taken.delay <= 1
    ever = _choice("vgg16-v100", "A", staleness=ANY)
    assert ever.taken.plan.config == "15-1", "PipeDream's own plan"
    assert ever.taken is ever.stale
    assert ever.taken.problem.options.correction == "ef", "it was seen to help momentum at this delay"


def test_a_simpler_plan_is_taken_where_it_is_hardly_slower() -> None:
    choice = _choice("resnet50-v100", "B")
    assert (choice.taken.kind, len(choice.taken.plan.stages)) == (DDP, 1)
    # With a batch of one microbatch a second worker has nothing to do.
    assert _choice("mnist-v100", "C", pipeplan.read_profile("mnist-v100").minibatch).taken.plan.busy == 1


def test_microbatches_divide_the_batch_and_measured_sizes_come_first() -> None:
    profile = pipeplan.read_profile("awd-lm-v100")
    half = profile.rescaled(40)
    measured = replace(profile, sizes=(Size(40, half.layers, half.tensors),))
    assert sizes_for(profile, 320, None) == ([80], [40, 20, 10])
    assert sizes_for(measured, 320, None) == ([80, 40], [20, 10])
    assert sizes_for(measured, 320, 32) == ([32], [])
    for batch, size, sizes in ((100, 32, "32"), (7, None, "80, 40, 20, 10")):
        with pytest.raises(InputError, match=f"a batch of {batch} samples cannot be cut into microbatches of {sizes}"):
            sizes_for(measured, batch, size)
    with pytest.raises(InputError, match="--batch must be at least 1"):
        pipeplan.solve(profile, pipeplan.cluster("C"), batch=0)


def test_ctrl_c_leaves_the_candidate_that_is_being_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanSearch, "climb", stop)
    machines = Machines(pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C"))
    choice = choose(Question(machines, options_for("cuda")))
    assert choice.taken.kind == DDP, "the first candidate"
    assert (choice.interrupted, choice.finished) == (True, False)


def test_a_pipeline_that_no_time_was_left_to_simulate_does_not_win_by_its_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = candidate_search.candidate_of

    def unsimulated(kind: str, *given: Any, **named: Any) -> tuple[Candidate | None, float]:
        one, bound_s = found(kind, *given, **named)
        if kind == PIPELINE and one is not None:
            one = replace(one, figure=Figure(one.figure.formula_s / 10, note="no time was left to simulate it"))
        return one, bound_s

    monkeypatch.setattr(candidate_search, "candidate_of", unsimulated)
    machines = Machines(pipeplan.read_profile("mnist-v100"), pipeplan.cluster("A"))
    choice = choose(Question(machines, options_for("cuda")))
    assert len(choice.rivals) > 2
    assert choice.taken.figure.simulated_s is not None


def test_the_bounds_are_those_of_all_candidates_and_plan_json_has_the_choice() -> None:
    choice = _choice("mnist-v100", "C")
    fast = min(choice.proven.flush.values()) / 2
    divided = replace(choice, proven=replace(choice.proven, divided_s=fast))
    assert divided.proven.sample_s == fast
    assert divided.bound_s(1.0) == fast * choice.taken.problem.profile.minibatch
    document = choice.to_json()
    assert (document["batch"], document["assumed"], document["staleness"]) == (128, True, 0)
    assert all(math.isclose(one["samples_per_s"], one["minibatch"] / one["minibatch_s"]) for one in document["rivals"])
    stale = _choice("mnist-v100", "C", 512, ANY)
    assert stale.to_json()["staleness"] is None
    assert set(stale.stale.updates.samples) == {512}, "plans with old gradients keep the batch that is given"


def test_rounded_gradients_take_the_time_of_half_the_weights() -> None:
    rounded = _choice("mnist-v100", "C").rounded
    profile = pipeplan.read_profile("mnist-v100")
    halves = [replace(layer, parameter_bytes=layer.parameter_bytes / 2) for layer in profile.layers]
    half = Machines(replace(profile, layers=tuple(halves)), pipeplan.cluster("C"))
    problem = Question(half, options_for("cuda"), 128).problem(32, stages=1)
    # The formula has no buckets. DDP's buckets keep the size of float32 gradients.
    assert math.isclose(rounded.figure.formula_s, evaluate(rounded.plan, problem).step_time_s, rel_tol=1e-9)
    assert rounded.sample_s * (1 + TOLERANCE) < _choice("mnist-v100", "C").taken.sample_s
    assert _choice("resnet50-v100", "A").rounded is None, "the exchange is hidden already"


# The order of servers that differ.

CUTS = 1000


def _three() -> Cluster:
    """Three servers of one worker, of which each has another speed."""
    servers = [Server(Device(f"d{speed}", "cpu", 1 << 30, speed), Level("server", 1, 0.0)) for speed in (1.0, 2.0, 3.0)]
    return Cluster.of_servers("drawn", servers, [Level("all", 3, 1e9)])


@pytest.mark.parametrize("seed", slow_but_for(range(6), range(12)))
def test_the_best_order_is_found(seed: int) -> None:
    instance, problem = drawn(seed, unequal_instance)
    inner = int(instance.levels[1][0])
    orders = list(itertools.permutations(range(len(instance.servers))))
    if len(instance.levels) > 2:  # two levels of two: only whole pairs, and the servers in them, change places
        orders = [order for order in orders if {order[0] // inner} == {number // inner for number in order[:inner]}]
    least = min(
        best(replace(instance, servers=tuple(instance.servers[number] for number in order))) for order in orders
    )
    several = len(list(distinct_orders(problem.cluster))) > 1
    if least == math.inf and several:
        with pytest.raises(InfeasibleError, match="no order of the servers"):
            choose_order(problem, CUTS)
    elif least < math.inf:
        chosen, choices = choose_order(problem, CUTS, simulates=False)
        assert bool(choices) is several
        if choices:
            assert choices[0].problem is chosen
            assert choices[0].step_time_s == pytest.approx(least, rel=1e-9)
            # Of all orders in which the file may list the servers the same is found.
            backwards = in_order(problem.cluster, tuple(reversed(range(len(problem.cluster.machines)))))
            _, others = choose_order(problem.within(backwards), CUTS, simulates=False)
            step_times = [one.step_time_s for one in others if one.step_time_s is not None]
            assert min(step_times) == pytest.approx(least, rel=1e-9)


def test_without_time_or_with_equal_servers_the_listed_order_stays() -> None:
    _, uniform = drawn(1, random_instance)
    assert uniform.cluster.uniform
    assert choose_order(uniform, CUTS) == (uniform, [])
    problem = drawn(3, unequal_instance)[1].within(_three())
    chosen, choices = choose_order(problem, CUTS, Deadline.after(0.0))
    assert chosen is problem
    assert not any(choice.in_time for choice in choices)


def test_orders_are_compared_by_their_figures() -> None:
    """The figure of a plan is at least the time by the formulas, and orders are sorted by it."""
    for seed in range(40):
        _, problem = drawn(seed, unequal_instance)
        if len(list(distinct_orders(problem.cluster))) == 1 or problem.options.inference:
            continue
        try:
            _, choices = choose_order(problem, CUTS)
            _, by_formula = choose_order(problem, CUTS, simulates=False)
        except InfeasibleError:
            continue
        formula_of = {one.order: one.step_time_s for one in by_formula}
        figures = [(one.step_time_s, formula_of[one.order] or 0) for one in choices if one.step_time_s]
        if any(figure_s > formula_s * 1.001 for figure_s, formula_s in figures):
            step_times = [one.step_time_s for one in choices[1:] if one.step_time_s]
            assert step_times == sorted(step_times)
            return
    pytest.fail("no drawn problem has a plan whose simulation is slower than the formulas")
