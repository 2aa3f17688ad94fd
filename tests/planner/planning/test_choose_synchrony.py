"""`--schedule best`: the synchronous plan, unless the asynchronous one gains enough; the best of both are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from commandline import Run
from decoders import tied_decoder

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import TooFewLayersError
from pipeplan.from_options.build_problem import BuiltProblem, build_problem
from pipeplan.planning.choose_schedule import choose_schedule, known_sizes
from pipeplan.planning.choose_synchrony import SynchronyChoice, choose_synchrony
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile, Size


def _built(name: str, cluster: str, **options: object) -> BuiltProblem:
    chosen = {"schedule": "best"} | options
    return build_problem(pipeplan.read_profile(name), pipeplan.cluster(cluster), **chosen)  # type: ignore[arg-type]


@cache
def _choice(name: str, cluster: str, **options: object) -> SynchronyChoice:
    choice = _built(name, cluster, **options).synchrony
    assert choice is not None
    return choice


def test_a_small_gain_is_not_worth_staleness() -> None:
    """AWD-LM on C: 1-3 with stashing is 7% faster than data parallelism."""
    choice = _choice("awd-lm-v100", "C")
    assert choice.synchronous is not None
    assert choice.asynchronous is not None
    assert 1.05 < choice.synchronous.sample_s / choice.asynchronous.sample_s < 1.1
    assert choice.taken is choice.synchronous
    assert choice.taken.updates.synchronous
    assert not choice.asynchronous.updates.synchronous
    assert choice.reason.startswith("Chosen: synchronous, because the fastest asynchronous plan has 7.3% more")
    assert _choice("awd-lm-v100", "C", asynchronous_gain=0.05, staleness="any").taken.plan.config == "1-3"


def test_a_plan_whose_gradients_are_very_old_is_taken_only_where_any_staleness_is_tolerated() -> None:
    choice = _choice("s2vt-v100", "B")
    assert choice.asynchronous is not None
    assert max(choice.asynchronous.updates.stale_by) == 5
    assert choice.taken is choice.synchronous
    assert "because its gradients are up to 5 updates old, and beyond 3 most models that were measured" in choice.reason
    taken = _choice("s2vt-v100", "B", staleness="any").taken
    assert taken.plan.config == choice.asynchronous.plan.config
    assert taken.formulas_s == pytest.approx(choice.asynchronous.formulas_s), "it has more in flight where that helps"
    assert max(_choice("gnmt16-v100", "B", simulate=False).taken.updates.stale_by) == 3, "which is not too old"


def test_a_large_gain_is_taken_and_staleness_can_be_ruled_out_or_bounded() -> None:
    choice = _choice("s2vt-v100", "B", staleness="any")
    assert choice.taken is choice.asynchronous
    assert choice.synchronous is not None
    assert set(choice.synchronous.updates.samples) == {16 * 80}
    ruled_out = _choice("s2vt-v100", "B", staleness="none")
    assert ruled_out.asynchronous is None
    assert ruled_out.taken.updates.synchronous
    assert ruled_out.taken.sample_s == pytest.approx(choice.synchronous.sample_s)
    bounded = _choice("s2vt-v100", "B", staleness="bounded")
    assert bounded.asynchronous is not None
    assert bounded.asynchronous.plan.schedule == "2bw"
    assert set(bounded.asynchronous.updates.samples) == {16 * 80}


def test_data_parallelism_that_beats_all_pipelines_is_synchronous_and_needs_no_comparison() -> None:
    choice = _choice("resnet50-v100", "B", simulate=False)
    assert (choice.taken.plan.config, choice.asynchronous) == ("16", None)
    assert "faster than any pipeline" in choice.reason


def test_only_sizes_that_a_profile_holds_or_interpolates_are_used_unless_nothing_else_fits() -> None:
    profile = pipeplan.read_profile("s2vt-v100")
    assert known_sizes(profile, [80, 40, 20]) == ([80], [40, 20])
    half = profile.rescaled(40)
    measured = replace(profile, sizes=(Size(40, half.layers, half.tensors),))
    assert known_sizes(measured, [80, 60, 40, 20]) == ([80, 60, 40], [20])
    _, tried = choose_schedule(profile, pipeplan.cluster("C"), Options(), 320, "none", 1000)
    assert {(one.minibatch, one.extrapolated) for one in tried} == {(80, False), (40, True), (20, True), (10, True)}
    assert [one.extrapolated for one in tried] == sorted(one.extrapolated for one in tried)
    # A batch of 40 samples holds no minibatch of 80, and no data parallelism is among plans of two stages.
    small = _choice("s2vt-v100", "C", batch=40, stages=2, staleness="none", simulate=False)
    assert small.taken.extrapolated
    assert "(extrapolated)" in small.taken.text


def test_a_correction_applies_to_the_schedules_that_may_be_corrected() -> None:
    profile = pipeplan.read_profile("mnist-v100")
    _, tried = choose_schedule(profile, pipeplan.cluster("C"), Options(correction="ef"), 256, "any", 1000)
    corrected = {one.schedule: one.problem.options.correction for one in tried}
    assert corrected == {
        "1f1b-flush": "none",
        "gpipe": "none",
        "2bw": "ef",
        "vertical-sync": "none",
        "1f1b-stashing": "ef",
    }


def test_an_extrapolated_size_has_a_pessimistic_pace() -> None:
    """A smaller minibatch of which nothing was measured takes as long as the smallest that was."""
    profile = pipeplan.read_profile("awd-lm-v100")
    _, tried = choose_schedule(profile, pipeplan.cluster("C"), Options(), 320, "none", 1000)
    rate = {(one.schedule, one.minibatch): one.sample_s for one in tried}
    for schedule in ("gpipe", "1f1b-flush"):
        paces = [rate[schedule, size] for size in (80, 40, 20, 10)]
        assert paces == sorted(paces)
    one = next(one for one in tried if one.minibatch == 10)
    layer, own = one.problem.profile.layers[0], profile.layers[0]
    assert (layer.forward_s, layer.saved_bytes) == (own.forward_s, own.saved_bytes // 8)


def test_the_table_and_plan_json_show_both(run: Run) -> None:
    words = ("solve", "awd-lm-v100", "--cluster", "C", "--schedule", "best", "--solver", "dp", "--no-write")
    lines = run(*words).out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("Chosen: ")]
    assert lines[at].endswith("(--asynchronous-gain). The DP alone compared them.")
    assert lines[at + 1].startswith("  synchronous   4, minibatch 80: ")
    assert lines[at + 2].startswith("  asynchronous  1-3, minibatch 80: ")
    choice = json.loads(run(*words, "--json").out)["choice"]
    assert choice["taken"] == "synchronous"
    assert choice["asynchronous_gain"] == pytest.approx(0.1)
    assert choice["synchronous"]["updates"] == {"synchronous": True, "stale_by": [0], "samples": [320]}
    assert choice["asynchronous"]["updates"]["stale_by"] == [4, 1]
    other = json.loads(run(*words, "--asynchronous-gain", "5%", "--staleness", "any", "--json").out)["choice"]
    assert other["taken"] == "asynchronous"


def test_tied_weights_that_keep_layers_together_do_not_hide_the_synchronous_plans() -> None:
    """Under asynchronous schedules the whole model but for the loss is one group, and three stages are asked for."""
    profile = tied_decoder(4)
    three = {"stages": 3, "memory": False}
    choice = build_problem(profile, pipeplan.cluster("C"), schedule="best", **three).synchrony
    assert choice is not None
    assert (len(choice.taken.plan.stages), choice.taken.plan.schedule, choice.asynchronous) == (3, "1f1b-flush", None)
    assert "layers that share weights leave too few to divide for an asynchronous plan" in choice.reason
    accumulated = {"batch": 4 * profile.minibatch, "staleness": "any"}
    tried = build_problem(profile, pipeplan.cluster("C"), schedule="auto", **accumulated, **three).schedules
    assert {one.schedule for one in tried} == {"1f1b-flush", "gpipe"}
    with pytest.raises(TooFewLayersError, match=r"^3 stages asked for, but under 1f1b-stashing layers that"):
        build_problem(profile, pipeplan.cluster("C"), schedule="1f1b-stashing", **three)
    with pytest.raises(TooFewLayersError, match=r"^50 stages asked for, but the model has only \d+ layers to cut"):
        build_problem(profile, pipeplan.cluster("C"), schedule="1f1b-flush", accumulate=4, stages=50)


def test_a_faster_baseline_that_is_asynchronous_is_marked_as_such(run: Run) -> None:
    words = ("solve", "awd-lm-v100", "--cluster", "C", "--solver", "dp", "--no-write", "--no-simulation")
    (row,) = (line for line in run(*words).out.splitlines() if "over best straight" in line)
    gain = float(row.split(")")[1].split("x")[0])
    assert row.endswith("asynchronous, unlike this plan") == (gain < 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--asynchronous-gain", "much"], "--asynchronous-gain: expected a share such as 5%, found 'much'"),
        (["--minibatch", "auto"], "leave out --minibatch auto"),
        (["--batch", "81"], "a batch of 81 samples cannot be cut into minibatches"),
        (["--staleness", "little"], "there is no tolerance 'little'"),
        (["--for", "megatron"], "leave out --schedule best"),
    ],
)
def test_contradictions_are_one_line(more: list[str], said: str, run: Run) -> None:
    done = run("solve", "awd-lm-v100", "--cluster", "C", "--schedule", "best", "--no-write", *more)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_a_correction_is_for_the_asynchronous_plan_alone() -> None:
    choice = _choice("s2vt-v100", "B", correction="ef", simulate=False)
    assert choice.synchronous is not None
    assert choice.asynchronous is not None
    assert choice.asynchronous.problem.options.correction == "ef"
    assert choice.synchronous.problem.options.correction == "none"


def test_a_stage_of_hardly_any_work_is_no_reason_for_stale_gradients() -> None:
    """The second layer has all weights, and its all-reduce ends after the backward pass."""
    layers = (Layer("places", 1e-6, 1e-6, 0, 0), Layer("rest", 0.01, 0.02, 300_000_000, 0))
    profile = Profile(layers, (Tensor("t", "places", ("rest",), 1000, 1000),), 4)
    cluster = Cluster("four", Device("d", "cuda", 1 << 34), (Level("server", 4, 1e10),))
    options = Options(memory=False)
    choice = choose_synchrony(profile, cluster, options, None, "any", 0.1, 1000)
    assert choice.asynchronous is not None
    assert choice.asynchronous.plan.config == "1-3"
    assert choice.synchronous is not None
    assert choice.synchronous.sample_s > choice.asynchronous.sample_s * 1.1
    assert choice.taken is choice.synchronous
    assert "gradients are averaged late" in choice.reason


@pytest.mark.parametrize(
    ("profile", "cluster", "chosen", "correction"),
    [
        ("vgg16-v100", "A", {}, "ef"),  # SGD with momentum, gradients up to two updates old
        ("vgg16-v100", "A", {"correction": "none"}, "none"),
        ("mnist-v100", "A", {}, "none"),  # gradients three updates old, for which nothing is known to help
        ("awd-lm-v100", "A", {}, "none"),  # SGD without momentum, which a correction harms
    ],
)
def test_asynchronous_plans_are_corrected_where_that_was_seen_to_help(
    profile: str, cluster: str, chosen: dict[str, Any], correction: str
) -> None:
    choice = _choice(profile, cluster, simulate=False, **chosen)
    assert choice.asynchronous is not None
    assert choice.asynchronous.problem.options.correction == correction
    assert ("Error feedback corrects them." in choice.asynchronous.text) == (correction == "ef")


def test_where_memory_is_short_for_a_correction_the_plan_goes_without() -> None:
    layers = (Layer("a", 0.01, 0.02, 1 << 30, 1000), Layer("b", 0.01, 0.02, 1 << 30, 1000))
    profile = Profile(layers, (Tensor("t", "a", ("b",), 1000, 1000),), 4, optimizer_state_ratio=2.0)
    profile = replace(profile, optimizer_name="AdamW")

    def correction(memory_bytes: int) -> str:
        cluster = Cluster("two", Device("d", "cuda", memory_bytes), (Level("server", 2, 1e9),))
        choice = build_problem(profile, cluster, stages=2).synchrony
        assert choice is not None
        assert choice.asynchronous is not None
        return choice.asynchronous.problem.options.correction

    # Three versions of the weights, gradients and two moments take 6 GiB; a correction keeps two steps beside them.
    assert correction(7 << 30) == "none"
    assert correction(9 << 30) == "ef"
