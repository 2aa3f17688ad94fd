"""The choice of a plan: one global batch, one figure, one tolerance, and old gradients only where they are allowed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from extents import slow_but_for

import pipeplan
from pipeplan.errors import InputError
from pipeplan.from_options.build_problem import Request, build_problem
from pipeplan.from_options.option_fields import options_for
from pipeplan.planning.candidate_search import DDP, ONE_SERVER, UNIFORM, ZERO_1
from pipeplan.planning.choose import Choice, choose
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.local_search import PlanSearch
from pipeplan.planning.question import ANY, Machines, Question, sizes_for
from pipeplan.problem.options import Sharding
from pipeplan.profile_data.profile import Size


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


def test_a_plan_for_a_trainer_has_the_best_microbatch() -> None:
    profile, cluster = pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C")
    size = profile.minibatch // 2
    layers = tuple(replace(one, forward_s=one.forward_s / 9, backward_s=one.backward_s / 9) for one in profile.layers)
    measured = replace(profile, sizes=(Size(size, layers, profile.rescaled(size).tensors),))
    request = Request(measured, cluster, batch=8 * profile.minibatch, target="torch-pipelining")
    assert build_problem(request).problem.profile.minibatch == size
    assert build_problem(replace(request, microbatch=2 * size)).problem.profile.minibatch == 2 * size


def test_ctrl_c_leaves_the_candidate_that_is_being_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanSearch, "climb", stop)
    machines = Machines(pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C"))
    choice = choose(Question(machines, options_for("cuda")))
    assert choice.taken.kind == DDP, "the first candidate"
    assert (choice.interrupted, choice.finished) == (True, False)


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
    assert stale.stale is not None
    assert set(stale.stale.updates.samples) == {512}, "plans with old gradients keep the batch that is given"
