"""The choice of a plan: one global batch, one figure, one tolerance, and old gradients only where they are allowed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from extents import slow_but_for

import pipeplan
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.from_options.build_problem import Request, build_problem
from pipeplan.from_options.option_fields import options_for
from pipeplan.planning import candidates
from pipeplan.planning.candidate_search import DDP, ONE_SERVER, UNIFORM, ZERO_1
from pipeplan.planning.candidates import Candidate, candidate_of
from pipeplan.planning.choose import Choice, choose
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.local_search import PlanSearch
from pipeplan.planning.question import ANY, Machines, Question, problem_of, sizes_for
from pipeplan.problem.options import Sharding
from pipeplan.profile_data.profile import Size
from pipeplan.util.deadline import NO_DEADLINE

NAMES = ("mnist-v100", "resnet50-v100", "awd-lm-v100")


@cache
def _choice(name: str, cluster: str, batch: int | None = None, staleness: float = 0, **options: object) -> Choice:
    machines = Machines(pipeplan.read_profile(name), pipeplan.cluster(cluster))
    return choose(Question(machines, options_for("cuda", **options), batch, staleness=staleness))


def _batch(one: Candidate) -> int:
    return (one.plan.accumulate or 0) * one.problem.profile.minibatch


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cluster", slow_but_for("C", "BC"))
def test_every_synchronous_candidate_trains_the_same_global_batch(name: str, cluster: str) -> None:
    choice = _choice(name, cluster)
    workers = pipeplan.cluster(cluster).workers
    assert choice.samples == workers * pipeplan.read_profile(name).minibatch
    assert choice.assumed
    assert {_batch(one) for one in choice.rivals} == {choice.samples}
    larger = _choice(name, cluster, 4 * choice.samples)
    assert {_batch(one) for one in larger.rivals} == {4 * choice.samples}
    assert not larger.assumed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cluster", slow_but_for("C", "ABC"))
def test_no_candidate_is_faster_than_the_answer_beyond_the_tolerance(name: str, cluster: str) -> None:
    choice = _choice(name, cluster)
    fastest = min(one.sample_s for one in choice.rivals)
    assert choice.taken in choice.rivals
    assert choice.taken.sample_s <= fastest * (1 + TOLERANCE)
    assert choice.proven.sample_s <= fastest * (1 + 1e-9)
    assert all(one.delay == 0 for one in choice.rivals), "no gradient is old unless the question allows it"


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


def test_a_given_batch_is_kept_by_plans_with_old_gradients() -> None:
    choice = _choice("mnist-v100", "C", 512, ANY)
    assert choice.stale is not None
    assert set(choice.stale.updates.samples) == {512}


def test_data_parallelism_is_taken_where_no_pipeline_is_more_than_3_percent_faster() -> None:
    choice = _choice("resnet50-v100", "B")
    assert (choice.taken.kind, len(choice.taken.plan.stages)) == (DDP, 1)


def test_fewer_workers_are_taken_where_more_are_hardly_faster() -> None:
    """With a batch of one microbatch a second worker has nothing to do."""
    profile = pipeplan.read_profile("mnist-v100")
    choice = _choice("mnist-v100", "C", profile.minibatch)
    assert choice.taken.plan.busy == 1


def test_a_slower_network_never_gives_a_faster_answer() -> None:
    profile, cluster = pipeplan.read_profile("awd-lm-v100"), pipeplan.cluster("C")
    times = []
    for factor in (0.25, 1.0, 4.0):
        levels = tuple(replace(level, bandwidth=level.bandwidth * factor) for level in cluster.levels)
        machines = Machines(profile, replace(cluster, levels=levels))
        times.append(choose(Question(machines, options_for("cuda"))).taken.sample_s)
    assert times[0] * (1 + TOLERANCE) >= times[1]
    assert times[1] * (1 + TOLERANCE) >= times[2]


@pytest.mark.slow
def test_constraints_never_give_a_faster_answer() -> None:
    free = _choice("vgg16-v100", "A")
    for options in ({"stages": 2}, {"max_workers": 9}, {"max_replicas": 8}, {"pins": (("features.0", 1),)}):
        machines = Machines(pipeplan.read_profile("vgg16-v100"), pipeplan.cluster("A"))
        held = choose(Question(machines, options_for("cuda", **options), free.samples)).taken
        assert held.sample_s * (1 + TOLERANCE) >= free.taken.sample_s, options


def test_microbatches_divide_the_batch_and_measured_sizes_come_first() -> None:
    profile = pipeplan.read_profile("awd-lm-v100")
    assert sizes_for(profile, 320, None) == ([80], [40, 20, 10])
    half = profile.rescaled(40)
    measured = replace(profile, sizes=(Size(40, half.layers, half.tensors),))
    assert sizes_for(measured, 320, None) == ([80, 40], [20, 10])
    assert sizes_for(measured, 320, 32) == ([32], [])
    with pytest.raises(InputError, match="a batch of 100 samples cannot be cut into microbatches of 32"):
        sizes_for(measured, 100, 32)
    with pytest.raises(InputError, match="a batch of 7 samples cannot be cut into microbatches of 80, 40, 20, 10"):
        sizes_for(measured, 7, None)
    with pytest.raises(InputError, match="--batch must be at least 1"):
        pipeplan.solve(profile, pipeplan.cluster("C"), batch=0)


def test_a_plan_for_a_trainer_has_the_best_microbatch() -> None:
    profile, cluster = pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C")
    size = profile.minibatch // 2
    layers = tuple(replace(one, forward_s=one.forward_s / 9, backward_s=one.backward_s / 9) for one in profile.layers)
    measured = replace(profile, sizes=(Size(size, layers, profile.rescaled(size).tensors),))
    request = Request(measured, cluster, batch=8 * profile.minibatch, target="torch-pipelining")
    assert build_problem(request).problem.profile.minibatch == size
    assert build_problem(replace(request, microbatch=2 * size)).problem.profile.minibatch == 2 * size


@pytest.mark.slow
def test_a_question_without_an_answer_says_that_nothing_fits() -> None:
    profile, cluster = pipeplan.read_profile("vgg16-v100"), pipeplan.cluster("C")
    layers = tuple(replace(layer, parameter_bytes=layer.parameter_bytes * 1000) for layer in profile.layers)
    with pytest.raises(InfeasibleError, match="no plan fits in memory"):
        choose(Question(Machines(replace(profile, layers=layers), cluster), options_for("cuda")))


def test_ctrl_c_leaves_the_candidate_that_is_being_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanSearch, "climb", stop)
    machines = Machines(pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C"))
    choice = choose(Question(machines, options_for("cuda")))
    assert choice.taken.kind == DDP, "the first candidate"
    assert (choice.interrupted, choice.finished) == (True, False)


def test_the_bounds_are_those_of_all_candidates() -> None:
    choice = _choice("mnist-v100", "C")
    slow, fast = 1.0, min(choice.proven.flush.values()) / 2
    divided = replace(choice, proven=replace(choice.proven, divided_s=fast))
    assert divided.proven.sample_s == fast
    assert divided.bound_s(slow) == fast * choice.taken.problem.profile.minibatch


def test_plan_json_has_the_choice() -> None:
    document = _choice("mnist-v100", "C").to_json()
    assert (document["batch"], document["assumed"], document["staleness"]) == (128, True, 0)
    assert _choice("mnist-v100", "C", staleness=ANY).to_json()["staleness"] is None
    assert all(math.isclose(one["samples_per_s"], one["minibatch"] / one["minibatch_s"]) for one in document["rivals"])


def test_data_parallelism_that_fits_nowhere_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = pipeplan.cluster("C")
    machines = Machines(pipeplan.read_profile("mnist-v100"), cluster)
    options = options_for("cuda", stages=1)
    fits = problem_of(machines, options, 32, 128)
    assert candidate_of(DDP, fits, 100, NO_DEADLINE)[0] is not None
    small = replace(cluster, device=replace(cluster.device, memory_bytes=2 * 10**6))
    monkeypatch.setattr(candidates, "best_in_time", lambda *given: pytest.fail("a search for what cannot fit"))
    assert candidate_of(DDP, replace(fits, cluster=small), 100, NO_DEADLINE) == (None, math.inf)
    with pytest.raises(pytest.fail.Exception, match="a search"):
        candidate_of(DDP, fits, 100, NO_DEADLINE)
