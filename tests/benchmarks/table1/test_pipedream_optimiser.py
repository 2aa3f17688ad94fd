"""The published figures: PipeDream's optimiser on its own profiles, and the optima of the cost model on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.cluster_data import cluster_toml as clusters
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.importers import pipedream
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.result import Status
from table1 import pipedream_optimiser


def _cluster(*levels: tuple[int, float]) -> Cluster:
    made = tuple(Level(f"level{number}", *level) for number, level in enumerate(levels))
    return Cluster("test", Device("V100", "cuda", 16 << 30), made)


@pytest.mark.parametrize(
    ("name", "levels", "replicas", "pace_s", "gain"),
    [
        ("vgg16", [(16, 1.25e9)], [13, 2, 1], 0.0547948908, 2.6608611367),
        ("vgg16", [(16, 3.125e9)], [15, 1], 0.0455248078, 1.8350588325),
        ("vgg16", [(4, 12e9)], [3, 1], 0.1700762187, 1.1919546283),
        ("vgg16", [(4, 12e9), (4, 1.25e9)], [12, 1, 1, 1, 1], 0.0668887521, 1.9987711855),
        ("vgg16", [(8, 25e9), (2, 3.125e9)], [8, 5, 2, 1], 0.0657666867, 1.0493634699),
        ("alexnet", [(16, 1.25e9)], [15, 1], 0.0150994944, 3.3880732126),
        ("alexnet", [(16, 3.125e9)], [14, 1, 1], 0.0062892600, 3.7624163080),
    ],
)
def test_pipedream_code_reproduces_the_published_optimiser(
    reference: Path, name: str, levels: list[tuple[int, float]], replicas: list[int], pace_s: float, gain: float
) -> None:
    profile = pipedream.read_pipedream_profile(reference / "pipedream" / f"{name}.txt", 128)
    problem = Problem(profile, _cluster(*levels))
    result = pipedream_optimiser.solve_published(problem, enumerate_cuts(problem, 2000), "pipedream-code")
    assert result.plan is not None
    assert result.objective_s == pytest.approx(pace_s, abs=1e-10)
    assert pipedream_optimiser.data_parallel_time(problem, "pipedream-code") / result.objective_s == pytest.approx(
        gain, abs=1e-9
    )
    # Inside a server several splits may tie; the servers' own replicas are what the figures state.
    if len(levels) == 1:
        assert [stage.replicas for stage in result.plan.stages] == replicas
    assert sum(stage.replicas for stage in result.plan.stages) == sum(replicas)


@pytest.mark.parametrize(
    ("name", "measured_at", "minibatch", "pace_s", "gain"),
    [
        ("vgg16", 128, 64, 0.0211703, 2.4508),
        ("resnet50", 128, 128, 0.0277137, 1.0),
        ("alexnet", 256, 256, 0.00754975, 3.03),
    ],
)
def test_the_three_optima_on_cluster_a(
    reference: Path, name: str, measured_at: int, minibatch: int, pace_s: float, gain: float
) -> None:
    profile = pipedream.read_pipedream_profile(reference / "pipedream" / f"{name}.txt", measured_at).rescaled(minibatch)
    problem = Problem(profile, clusters.load_cluster("A"), Options(memory=False, contention=False))
    outcome = solve(problem, Settings("dp", certify=False, simulate=False))
    assert outcome.results[0].status == Status.OPTIMAL
    assert outcome.evaluation.pace_s == pytest.approx(pace_s, rel=0.5 * 10 ** -len(f"{pace_s:g}".lstrip("0.")) * 10)
    assert outcome.baselines[0].gain(outcome.evaluation.pace_s) == pytest.approx(gain, abs=5e-3)
    if name == "vgg16":
        assert outcome.plan.config == "15-1"
        assert len(outcome.plan.stages[0].layers) == 25
    if name == "resnet50":
        assert outcome.plan.config == "16"


def _chain() -> Profile:
    return Profile(
        layers=(Layer("a", 4.0, 8.0, 10, 0), Layer("b", 2.0, 4.0, 400, 0)),
        tensors=(Tensor("x", "a", ("b",), 30, 30),),
        minibatch=1,
    )


def test_pipedream_code_by_hand() -> None:
    # 3 workers at 100 bytes/s. One stage: (18 + 4·2·410/(3·100))/3. Split 2-1: the first is a single stage on 2,
    # (12 + 4·10/200)/2, the last takes 6 and its input 2·30/100.
    problem = Problem(_chain(), _cluster((3, 100.0)))
    result = pipedream_optimiser.solve_published(problem, enumerate_cuts(problem, 10), "pipedream-code")
    single = (18 + 4 * 2 * 410 / 300) / 3
    split = max((12 + 4 * 10 / 200) / 2, 6, 0.6)
    assert result.objective_s == pytest.approx(min(single, split))
    assert pipedream_optimiser.data_parallel_time(problem, "pipedream-code") == pytest.approx(single)


def test_pipedream_paper_by_hand() -> None:
    problem = Problem(_chain(), _cluster((3, 100.0)))
    result = pipedream_optimiser.solve_published(problem, enumerate_cuts(problem, 10), "pipedream-paper")
    assert result.objective_s == pytest.approx(
        min(max(18, 2 * 2 * 410 / 100) / 3, max(12 / 2, 2 * 10 / 100 / 2, 0.6, 6))
    )
    assert result.plan is not None
    assert evaluate(result.plan, problem).pace_s > 0
