"""Calibrating by runs whose layers' true times, links and bubbles are known."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run as Call
from runs import summary_of, write_run

from pipeplan import cluster_file, cluster_write
from pipeplan.calibrate.calibrate import Calibrated, calibrate
from pipeplan.calibrate.observed import Busy, Observed
from pipeplan.cluster import Cluster, Device, Level
from pipeplan.evaluate import evaluate
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Options, Problem
from pipeplan.profile import Layer, Profile, Provenance, Size, Tensor

GIB = 2**30


def chain(times: list[tuple[float, float, float]], parameters: int = 1000, **more: Any) -> Profile:
    """Layers in a row, with (forward, backward, update) seconds."""
    layers = tuple(
        Layer(f"l{index}", forward, backward, parameters, 10, update_s=update)
        for index, (forward, backward, update) in enumerate(times)
    )
    names = [layer.name for layer in layers]
    tensors = tuple(Tensor(one, one, (other,), 8, 8) for one, other in itertools.pairwise(names))
    return Profile(layers, tensors, 4, model_ref="m.py:f", model_name="m", **more)


def cluster(workers: int, *, cores: int = 0, bandwidth: float = 1e6, efficiency: float = 0.5) -> Cluster:
    level = Level("server", workers, bandwidth, 0.0, efficiency, efficiency, "nominal")
    return Cluster("here", Device("cpu", "cpu", 8 * GIB, cores=cores), (level,))


def plan_of(profile: Profile, cuts: list[int], replicas: list[int], depths: list[int] | None = None) -> Plan:
    """Stages of consecutive layers, that begin at 0 and at the cuts."""
    names, first, stages = [layer.name for layer in profile.layers], 0, []
    ends = [*cuts, len(names)]
    for index, (start, end, count) in enumerate(zip([0, *cuts], ends, replicas, strict=True)):
        depth = depths[index] if depths else 2 * (len(replicas) - index) - 1
        stages.append(Stage(tuple(names[start:end]), tuple(range(first, first + count)), depth, depth))
        first += count
    return Plan(tuple(stages))


def observed(plan: Plan, pace_s: float, *stages: Busy, overlap: float = 0.0, **options: Any) -> Observed:
    shares = (1.0,) * len(stages)
    return Observed("run", plan, Options(overlap=overlap, **options), pace_s, 1.0, 50, stages, shares)


def sums(profile: Profile, stage: Stage) -> tuple[float, ...]:
    own = [layer for layer in profile.layers if layer.name in stage.layers]
    return tuple(sum(getattr(one, what) for one in own) for what in ("forward_s", "backward_s", "update_s"))


def busy(times: tuple[float, ...], **more: float) -> Busy:
    forward, backward, update = times
    return Busy(forward, backward, update, **({"sync_s": 0.0, "load_s": 0.0, "own_s": 0.0} | more))


def predicted(found: Calibrated, plan: Plan, overlap: float = 0.0) -> float:
    return evaluate(plan, Problem(found.profile, found.cluster, Options(overlap=overlap))).pace_s


def test_a_profile_that_is_off_by_a_factor_a_stage_is_put_right() -> None:
    """Then every plan is predicted as with the true times, which the run never showed layer by layer."""
    true = chain([(0.1, 0.2, 0.01), (0.3, 0.1, 0.02), (0.2, 0.4, 0.03), (0.1, 0.3, 0.04)])
    plan = plan_of(true, [2], [1, 1])
    factors = [(1.3, 0.7, 2.0)] * 2 + [(0.5, 1.1, 3.0)] * 2
    wrong = chain(
        [
            (layer.forward_s / f, layer.backward_s / b, layer.update_s / u)
            for layer, (f, b, u) in zip(true.layers, factors, strict=True)
        ]
    )
    here = cluster(2)
    pace = evaluate(plan, Problem(true, here, Options(overlap=0.0))).pace_s
    found = calibrate([observed(plan, pace, *(busy(sums(true, one)) for one in plan.stages))], wrong, here)
    assert found.slack == pytest.approx(1.0)
    for new, old in zip(found.profile.layers, true.layers, strict=True):
        for what in ("forward_s", "backward_s", "update_s"):
            assert getattr(new, what) == pytest.approx(getattr(old, what))
    other = plan_of(true, [1, 3], [1, 1, 1])
    problems = (Problem(one, cluster(3), Options(overlap=0.0)) for one in (found.profile, true))
    new_pace, true_pace = (evaluate(other, problem).pace_s for problem in problems)
    assert new_pace == pytest.approx(true_pace)


@pytest.mark.parametrize("seed", range(12))
def test_what_ran_is_predicted_as_it_was_measured(seed: int) -> None:
    """Whatever keeps the workers busy, and however long they wait."""
    rng = random.Random(seed)
    times = [tuple(rng.uniform(0.01, 0.5) for _ in range(3)) for _ in range(rng.randint(2, 6))]
    profile = chain(times, parameters=rng.choice([0, 2000]))  # type: ignore[arg-type]
    count = rng.randint(1, min(3, len(times)))
    replicas = [rng.randint(1, 3) for _ in range(count)]
    cuts = sorted(rng.sample(range(1, len(times)), count - 1))
    plan = plan_of(profile, cuts, replicas, [400, 40, 1][-count:])
    stages = [
        Busy(*(rng.uniform(0.1, 0.5) for _ in range(3)), rng.uniform(0, 0.1) if r > 1 else 0.0, 0.02, 0.03)
        for r in replicas
    ]
    overlap = rng.choice([0.0, 0.5, 1.0])
    busiest = max(one.total_s / r for one, r in zip(stages, replicas, strict=True))
    run = observed(plan, busiest * rng.uniform(1.0, 1.4), *stages, overlap=overlap)
    found = calibrate([run], profile, cluster(sum(replicas)))
    assert not found.unexplained
    assert found.paces_s[0] == pytest.approx(run.pace_s)
    assert predicted(found, plan, overlap) == pytest.approx(run.pace_s)


def test_time_in_which_nobody_is_busy_stretches_all_layers_alike() -> None:
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.1, 0.0)])
    plan = plan_of(profile, [1], [1, 1])
    run = observed(plan, 0.36, *(busy(sums(profile, one)) for one in plan.stages))
    found = calibrate([run], profile, cluster(2))
    assert found.slack == pytest.approx(1.2)
    for new, old in zip(found.profile.layers, profile.layers, strict=True):
        assert (new.forward_s, new.backward_s) == pytest.approx((1.2 * old.forward_s, 1.2 * old.backward_s))


def test_reading_samples_goes_with_the_first_layer_and_the_rest_is_spread() -> None:
    profile = chain([(0.1, 0.3, 0.0), (0.1, 0.3, 0.0)])
    run = observed(plan_of(profile, [], [1]), 1.0, busy((0.2, 0.6, 0.0), load_s=0.04, own_s=0.16))
    first, second = calibrate([run], profile, cluster(1)).profile.layers
    assert (second.forward_s, second.backward_s) == pytest.approx((0.12, 0.36))
    assert (first.forward_s, first.backward_s) == pytest.approx((0.16, 0.36))


def test_steps_are_spread_by_parameters_where_the_profile_says_nothing_of_them() -> None:
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    layers = (replace(profile.layers[0], parameter_bytes=3000), profile.layers[1])
    run = observed(plan_of(profile, [], [1]), 0.64, busy((0.2, 0.4, 0.04)))
    found = calibrate([run], replace(profile, layers=layers), cluster(1)).profile
    assert [layer.update_s for layer in found.layers] == pytest.approx([0.03, 0.01])


def test_one_step_for_several_minibatches_is_one_step() -> None:
    """Eight minibatches an update: each was measured with an eighth of the step of 0.4 s."""
    profile = chain([(0.1, 0.2, 0.1)])
    plan = replace(plan_of(profile, [], [1]), schedule="1f1b-flush", accumulate=8)
    options = {"schedule": "1f1b-flush", "accumulate": 8}
    found = calibrate([observed(plan, 0.35, busy((0.1, 0.2, 0.05)), **options)], profile, cluster(1))
    assert found.profile.layers[0].update_s == pytest.approx(0.4)


def test_a_stage_that_recomputes_runs_forward_twice() -> None:
    profile = chain([(0.1, 0.1, 0.0)])
    plan = plan_of(profile, [], [1])
    plan = replace(plan, stages=(replace(plan.stages[0], recompute=True),))
    found = calibrate([observed(plan, 0.7, busy((0.2, 0.5, 0.0)))], profile, cluster(1))
    assert (found.profile.layers[0].forward_s, found.profile.layers[0].backward_s) == pytest.approx((0.2, 0.3))


def test_several_runs_are_averaged() -> None:
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    plans = [plan_of(profile, [], [1]), plan_of(profile, [1], [1, 1])]
    both = [
        observed(plans[0], 0.6, busy((0.2, 0.4, 0.0))),
        observed(plans[1], 0.6, busy((0.1, 0.2, 0.0)), busy((0.2, 0.4, 0.0))),
    ]
    found = calibrate(both, profile, cluster(2))
    first, second = (layer.forward_s / found.slack for layer in found.profile.layers)
    assert (first, second) == pytest.approx((0.1, 0.15))


def test_other_minibatch_sizes_change_by_the_same_factors() -> None:
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    size = Size(8, tuple(replace(one, forward_s=0.15, backward_s=0.3) for one in profile.layers), profile.tensors)
    run = observed(plan_of(profile, [], [1]), 0.9, busy((0.3, 0.6, 0.0)))
    found = calibrate([run], replace(profile, sizes=(size,)), cluster(1)).profile
    layer = found.sizes[0].layers[0]
    assert (layer.forward_s, layer.backward_s) == pytest.approx((0.225, 0.45))


def ring_s(replicas: int, size: float, rate: float) -> float:
    """2 (r-1)/r of the bytes over each link (Patarasuk and Yuan)."""
    return 2 * (replicas - 1) / replicas * size / rate


@pytest.mark.parametrize(("efficiency", "expected"), [(0.1, 0.1), (0.8, 0.8), (1.7, 1.0)])
def test_the_efficiency_of_all_reduces_is_found(efficiency: float, expected: float) -> None:
    """Data parallelism on three workers; more than the whole bandwidth is what hides behind computing."""
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)], parameters=50_000)
    sync = ring_s(3, 100_000, 1e6 * efficiency)
    run = observed(plan_of(profile, [], [3]), (0.6 + sync) / 3, busy((0.2, 0.4, 0.0), sync_s=sync))
    found = calibrate([run], profile, cluster(3))
    assert found.cluster.levels[0].allreduce_efficiency == pytest.approx(expected)
    assert found.cluster.levels[0].sendrecv_efficiency == 0.5
    assert found.paces_s[0] == pytest.approx(run.pace_s)


@pytest.mark.parametrize(("overlap", "held"), [(1.0, 0.2), (0.5, 0.4), (0.5, 0.1)])
def test_what_of_an_all_reduce_hides_behind_backward_is_part_of_it(overlap: float, held: float) -> None:
    """An all-reduce of G beside a backward pass of 0.4: max(0.4, G) + (1 - overlap) min(0.4, G) in all."""
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)], parameters=50_000)
    run = observed(plan_of(profile, [], [2]), (0.6 + held) / 2, busy((0.2, 0.4, 0.0), sync_s=held), overlap=overlap)
    found = calibrate([run], profile, cluster(2))
    whole = ring_s(2, 100_000, 1e6 * found.cluster.levels[0].allreduce_efficiency)
    assert max(0.4, whole) + (1 - overlap) * min(0.4, whole) == pytest.approx(0.4 + held)


@pytest.mark.parametrize(
    ("replicas", "overlap", "why"),
    [([2, 1], 0.0, "updates run late"), ([2], 1.0, "hide behind computing"), ([1, 1], 0.0, "no stage had replicas")],
)
def test_an_efficiency_that_cannot_be_told_stays(replicas: list[int], overlap: float, why: str) -> None:
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    plan = plan_of(profile, [1][: len(replicas) - 1], replicas)
    stages = [busy(sums(profile, one), sync_s=0.001 if one.replicas > 1 else 0.0) for one in plan.stages]
    found = calibrate([observed(plan, 0.4, *stages, overlap=overlap)], profile, cluster(sum(replicas)))
    assert found.cluster.levels[0].allreduce_efficiency == 0.5
    (fitted,) = (one for one in found.fitted if one.operation == "all-reduce")
    assert why in fitted.why


def test_a_boundary_that_bounds_the_pace_says_what_it_reaches() -> None:
    """8 bytes a minibatch: at 16 bytes/s and half of it 1 s; 2 s were measured, with 0.3 s of work."""
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    plan = plan_of(profile, [1], [1, 1], [9, 1])
    run = observed(plan, 2.0, *(busy(sums(profile, one)) for one in plan.stages))
    found = calibrate([run], profile, cluster(2, bandwidth=16.0))
    assert found.cluster.levels[0].sendrecv_efficiency == pytest.approx(0.25)
    assert found.slack == pytest.approx(1.0)
    assert found.paces_s[0] == pytest.approx(2.0)


def test_where_cores_are_shared_only_computing_counts() -> None:
    """Three workers on two cores: the pace is all that they compute over two."""
    profile = chain([(0.1, 0.2, 0.0)] * 3)
    plan = plan_of(profile, [1, 2], [1, 1, 1], [20, 9, 1])
    run = replace(observed(plan, 0.5, *(busy((0.1, 0.2, 0.0)) for _ in range(3))), shares=(0.6,) * 3)
    found = calibrate([run], profile, cluster(3, cores=2))
    assert found.slack == pytest.approx(0.5 / (3 * 0.3 / 2))


# What is read, written and refused.


@pytest.fixture
def plan_folder(run: Call, tmp_path: Path) -> Path:
    """A plan of a small chain on two workers, solved in an empty folder, with its profile above it."""
    profile = chain([(0.1, 0.2, 0.01), (0.1, 0.1, 0.01), (0.1, 0.2, 0.01)])
    replace(profile, provenance=Provenance(notes=("kept",), how="stopwatch")).save(tmp_path / "profile.json")
    cluster_write.save(cluster(2, bandwidth=1e9), tmp_path / "here.toml")
    ran = run("solve", "profile.json", "--cluster", "here.toml", "--straight", "--overlap", "0")
    assert ran.code == 0, ran.err
    return tmp_path / "plan"


MEASURED = ({"forward_s": 0.25, "backward_s": 0.5, "update_s": 0.03}, {"forward_s": 0.3, "backward_s": 0.3})


def a_run(plan_folder: Path, name: str = "one", pace_s: float = 0.8, **more: Any) -> Path:
    return write_run(plan_folder, name, summary_of(plan_folder, pace_s, MEASURED, **more))


def test_solving_again_predicts_what_was_measured(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    a_run(plan_folder)
    before = (tmp_path / "profile.json").read_bytes()
    ran = run("calibrate", "plan/runs/one")
    assert ran.code == 0, ran.err
    assert "solve again with: pipeplan solve calibrated.json --cluster calibrated.toml" in ran.err
    assert (tmp_path / "profile.json").read_bytes() == before
    stages = json.loads((plan_folder / "plan.json").read_text())["plan"]["stages"]
    pins = [f"{stage['layers'][0]}={number}" for number, stage in enumerate(stages, 1)]
    again = run(
        *("solve", "calibrated.json", "--cluster", "calibrated.toml", "--straight", "--overlap", "0", "--json"),
        *(part for pin in pins for part in ("--pin", pin)),
        *("--pin", f"{stages[0]['layers'][-1]}=1", "-o", "plan-2"),
    )
    assert json.loads(again.out)["prediction"]["minibatch_s"] == pytest.approx(0.8)
    stage = json.loads((tmp_path / "plan-2" / "stages" / "stage-0.json").read_text())
    assert stage["profile"] == "calibrated"


def test_the_new_profile_says_where_it_is_from(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    a_run(plan_folder)
    for output in ("c1.json", "c2.json"):
        assert run("calibrate", "plan", "-o", output).code == 0
    origin = Profile.load(tmp_path / "c2.json").provenance
    assert origin.kind == "calibrated"
    assert "proportion to a profile that was measured (stopwatch)" in origin.how
    assert origin.notes[0] == "kept"
    assert sum("run one, stage " in note for note in origin.notes) == 2
    assert cluster_file.load(str(tmp_path / "c2.toml")).levels[0].source == "nominal"
    assert "calibrated by runs on" in " ".join(run("profile", "show", "c2.json").out.split())


def test_json_has_all_that_was_found(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    a_run(plan_folder)
    ran = run("calibrate", "plan", "--json", "--no-write")
    assert ran.code == 0
    assert not (tmp_path / "calibrated.json").exists()
    found = json.loads(ran.out)
    assert found["runs"][0]["measured_s"] == 0.8
    assert found["runs"][0]["calibrated_s"] == pytest.approx(0.8)
    assert found["stages"][0]["layers"][0] == "l0"
    assert {one["operation"] for one in found["links"]} == {"all-reduce", "send/recv"}


def test_nothing_is_replaced_unasked(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    """And only what was calibrated before, however it is asked for."""
    a_run(plan_folder)
    assert run("calibrate", "plan").code == 0
    for options, complaint in (
        ((), "calibrated.json is there already"),
        (("-o", "new.json", "--cluster-output", "calibrated.toml"), "calibrated.toml is there already"),
        (("-o", "profile.json", "--cluster-output", "new.toml", "--force"), "profile.json is a profile that plans are"),
        (("-o", "new.json", "--cluster-output", "here.toml", "--force"), "here.toml was not written by `pipeplan cal"),
        (("-o", "same", "--cluster-output", "same"), "cannot both be same"),
        (("-o", "."), "is a folder"),
    ):
        ran = run("calibrate", "plan", *options)
        assert (ran.code, ran.out) == (2, "")
        assert complaint in " ".join(ran.err.split())
        assert not {"new.json", "new.toml", "same"} & {path.name for path in tmp_path.iterdir()}
    assert run("calibrate", "plan", "--force").code == 0


def broken(what: str, plan_folder: Path, tmp_path: Path) -> str:
    """Make a run that cannot be used; returns its folder."""
    more: dict[str, Any] = {}
    if what == "short":
        more = {"steady_minibatches": 3}
    elif what == "fill":
        more = {"includes_fill": True}
    elif what == "unmeasured":
        more = {"minibatch_s": {"predicted": 1.0, "measured": None, "ratio": None}}
    elif what == "still":
        more = {"minibatch_s": {"predicted": 1.0, "measured": 0.0, "ratio": None}}
    elif what == "other":
        more = {"plan": "sha256:another"}
    folder = a_run(plan_folder, **more)
    summary = json.loads((folder / "summary.json").read_text())
    if what == "stages":
        summary["stages"].pop()
    elif what == "zero":
        summary["stages"][1]["backward_s"]["measured"] = 0.0
    elif what == "old":
        del summary["stages"][0]["measured"]["cpu_s"]
    (folder / "summary.json").write_text(json.dumps(summary))
    if what == "unfinished":
        (folder / "summary.json").unlink()
    elif what == "gone":
        (plan_folder / "plan.json").unlink()
    elif what == "profile":
        (tmp_path / "profile.json").unlink()
    return "nothing" if what == "nothing" else "plan/runs/one"


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("nothing", "nothing does not exist"),
        ("unfinished", "has no summary.json"),
        ("short", "too few minibatches to measure a pace (3 after the fill"),
        ("fill", "too few minibatches"),
        ("unmeasured", "too few minibatches"),
        ("still", "the measured pace is zero"),
        ("other", "is a run of another plan than"),
        ("stages", "measured 1 stages, and"),
        ("zero", "measured no time at all"),
        ("old", "of an older version"),
        ("gone", "is not in the folder of its plan: name that with --plan"),
        ("profile", "name it with --profile"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_line(
    run: Call, plan_folder: Path, tmp_path: Path, what: str, complaint: str
) -> None:
    ran = run("calibrate", broken(what, plan_folder, tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert complaint in ran.err
    assert not (tmp_path / "calibrated.json").exists()
    assert not (tmp_path / "calibrated.toml").exists()


def test_runs_of_other_models_and_clusters_are_refused(run: Call, plan_folder: Path, tmp_path: Path) -> None:
    a_run(plan_folder)
    cluster_write.save(cluster(3, bandwidth=1e9), tmp_path / "three.toml")
    assert run("solve", "profile.json", "--cluster", "three.toml", "--straight", "-o", "wide").code == 0
    chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)]).save(tmp_path / "two.json")
    assert run("solve", "two.json", "--cluster", "here.toml", "--straight", "-o", "short").code == 0
    for folder in ("wide", "short"):
        stages = len(list((tmp_path / folder / "stages").iterdir()))
        write_run(tmp_path / folder, "one", summary_of(tmp_path / folder, 0.8, [MEASURED[0]] * stages))
    assert "is for another cluster than" in run("calibrate", "plan", "wide").err
    assert "is a plan of another model than" in run("calibrate", "plan", "short").err
