"""Documents as `pipeplan report` embeds them: every kind of plan that the page must show, and hostile names."""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from long_chains import long_chain
from reported import branching, report_of, small_cluster, source_of, vgg, write_run

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.depths import assign_depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome, Verdict
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_json import plan_document
from pipeplan.report.build import build_report
from pipeplan.report.source import ReportSource, read_report_source
from pipeplan.run_data.run_folder import read_run
from pipeplan.util.files import Node

Document = dict[str, Any]
HOSTILE = '<img src=x onerror="window.hit=1"></script><script>window.hit=1</script>{{7*7}}'


def planned(
    profile: Profile, cluster: Cluster, replicas: Sequence[int], *, known: bool = True, inference: bool = False
) -> ReportSource:
    """A plan with so many replicas in each stage, and as many layers in one as in another; nothing is searched for.

    `known`: whether the profile is at hand.
    """
    problem = Problem(profile, cluster, Options(memory=False, contention=False, inference=inference))
    names = [layer.name for layer in profile.layers]
    ends = [len(names) * number // len(replicas) for number in range(len(replicas) + 1)]
    workers = itertools.pairwise([0, *itertools.accumulate(replicas)])
    stages = [
        Stage(tuple(names[start:end]), tuple(range(*mine)), 1, 1)
        for (start, end), mine in zip(itertools.pairwise(ends), workers, strict=True)
    ]
    plan = assign_depths(Plan(tuple(stages), inference=inference), problem, 1.0)
    score = evaluate(assign_depths(plan, problem, evaluate(plan, problem).step_time_s), problem)
    plan = assign_depths(plan, problem, score.step_time_s)
    outcome = Outcome(problem, plan, evaluate(plan, problem), (), Verdict(False, False, ""), (), {})
    written = json.loads(json.dumps(plan_document(outcome)))
    return read_report_source(Node(written, "plan.json"), profile if known else None)


def with_run(source: ReportSource) -> Document:
    """The report on a plan and on a run of it that took 1.25 times as long."""
    with tempfile.TemporaryDirectory() as folder:
        run = read_run(write_run(Path(folder) / "run", source))
        return build_report(source, run).to_json()


def renamed(profile: Profile, mark: str) -> Profile:
    """The profile with a mark in every text that a user's files can hold."""
    layers = tuple(replace(layer, name=layer.name + mark, op=layer.op + mark) for layer in profile.layers)
    tensors = tuple(
        Tensor(
            one.name + mark,
            one.producer + mark,
            tuple(name + mark for name in one.consumers),
            one.bytes,
            one.gradient_bytes,
        )
        for one in profile.tensors
    )
    return replace(profile, layers=layers, tensors=tensors, model_name=f"small{mark}")


def _wide(workers: int) -> Cluster:
    levels = (Level("server", 8, 1e11), Level("cluster", -(-workers // 8), 1e10))
    return Cluster("Z", Device("chip", "cuda", 2**34), levels)


def _hostile() -> Document:
    cluster = replace(small_cluster(), name=f"tiny{HOSTILE}", device=Device(f"chip{HOSTILE}", "cuda", 10**9))
    return with_run(planned(renamed(branching(), HOSTILE), cluster, (1, 1, 1)))


def _kind(make: Callable[[], Document]) -> Callable[[], Document]:
    """The same document at every call, as a copy that a test may change."""
    made = cache(make)
    return lambda: copy.deepcopy(made())


KINDS = {
    "plan": _kind(lambda: report_of(source_of(vgg(), "A", certify=True))),
    "run": _kind(lambda: with_run(planned(branching(), small_cluster(), (2, 1, 1)))),
    "inference": _kind(lambda: report_of(planned(vgg(), small_cluster(), (3, 1), inference=True))),
    "no-profile": _kind(lambda: report_of(planned(branching(), small_cluster(), (2, 2), known=False))),
    "one-stage": _kind(lambda: report_of(planned(branching(), small_cluster(2, 4), (8,)))),
    "many-stages": _kind(lambda: report_of(planned(long_chain(160), _wide(16), (1,) * 16))),
    "hostile": _kind(_hostile),
    "big": _kind(lambda: report_of(planned(long_chain(1000), _wide(1024), (16,) * 64))),
}
