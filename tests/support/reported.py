"""Plans with their reports, for tests: small ones that are solved in no time, and runs of them that never were.

`document_of_kind` has reports of every kind of plan that the page must show, with hostile names too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import operator
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_toml import load_cluster
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_json
from pipeplan.report.build import build_report
from pipeplan.report.source import ReportSource, read_report_source
from pipeplan.run_data.run_folder import read_run
from pipeplan.util import files
from pipeplan.util.files import Node

Document = dict[str, Any]


def vgg() -> Profile:
    """The bundled VGG-16."""
    return Profile.load(files.bundled_folder("profiles") / "vgg16-v100.json")


def branching(layers: int = 8) -> Profile:
    """A chain with a shortcut around every third layer, each layer with sizes of its own."""
    made = tuple(
        Layer(f"l{i}", 1e-3 * (1 + i % 3), 2e-3 * (1 + i % 2), 1000 * (i + 1), 5000 * (i + 1), op=f"Op{i % 4}")
        for i in range(layers)
    )
    tensors = []
    for i in range(layers - 1):
        readers = [f"l{i + 1}"] + ([f"l{i + 3}"] if i % 3 == 0 and i + 3 < layers else [])
        tensors.append(Tensor(f"t{i}", f"l{i}", tuple(readers), 100 * (i + 1), 70 * (i + 1)))
    return Profile(layers=made, tensors=tuple(tensors), minibatch=4, model_name="small", optimizer_state_ratio=2.0)


def small_cluster(servers: int = 2, inside: int = 2) -> Cluster:
    """Quick links inside a server, slow ones between them."""
    levels = (Level("server", inside, 1e9, 1e-6), Level("cluster", servers, 1e7, 1e-5))
    return Cluster("tiny", Device("chip", "cuda", 10**9), levels)


def source_of(
    profile: Profile,
    cluster: Cluster | str,
    options: Options | None = None,
    solver: str = "dp",
    *,
    certify: bool = False,
) -> ReportSource:
    """The best plan for a profile on a cluster, as a report takes it."""
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    outcome = solve(Problem(profile, where, options or Options()), Settings(solver=solver, certify=certify))
    document = json.loads(json.dumps(plan_json.plan_document(outcome)))
    return read_report_source(Node(document, "plan.json"), profile)


def report_of(source: ReportSource) -> Document:
    """The document of its report."""
    return build_report(source).to_json()


def changed(source: ReportSource, change: Document) -> ReportSource:
    """The source with other fields in its plan.json, by their names with dots."""
    root = json.loads(json.dumps(source.root.value))
    for path, value in change.items():
        *parents, last = path.split(".")
        functools.reduce(operator.getitem, parents, root)[last] = value
    return read_report_source(Node(root, "plan.json"), source.problem.profile)


def rows(columns: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    """Columns as rows."""
    assert len({len(column) for column in columns.values()}) <= 1, "all columns are of one length"
    return list(zip(*columns.values(), strict=True))


def write_run(folder: Path, source: ReportSource, *, slower: float = 1.25, timelines: bool = True) -> Path:
    """A run folder such as the executor would leave, of a straight plan that is so much slower than predicted.

    Every worker passes six minibatches forward and back, one after the other.
    """
    digests = [source.root[name]["digest"].text() for name in ("profile", "cluster")]
    plan = source.plan.digest(*digests)
    folder.mkdir(parents=True)
    stages = []
    for index, load_ in enumerate(source.scenario.stages):
        times = {"forward_s": load_.forward_s, "backward_s": load_.backward_s, "update_s": 0.0, "sync_s": 0.0}
        pairs: Document = {
            name: {"predicted": value, "measured": slower * value, "ratio": slower if value else None}
            for name, value in (times | {"memory_bytes": load_.memory_bytes}).items()
        }
        own = {"wait_s": 0.001, "load_s": 0.002, "send_s": None}
        stages.append({"stage": index, "workers": list(load_.workers), "measured": own} | pairs)
        for replica, worker in enumerate(load_.workers) if timelines else ():
            _timeline(folder, plan, worker, index, replica, [slower * load_.forward_s, slower * load_.backward_s])
    summary = {
        "format": "pipeplan-summary",
        "version": 1,
        "plan": plan,
        "mode": "training",
        "minibatch": 4,
        "minibatch_s": {"predicted": source.step_time_s, "measured": slower * source.step_time_s, "ratio": slower},
        "includes_fill": False,
        "steady_minibatches": 40,
        "stages": stages,
        "cause": {"kind": "forward", "stage": 0, "explains": 1.0, "text": "stage 0 computes for longer"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _timeline(folder: Path, plan: str, worker: int, stage: int, replica: int, passes_s: list[float]) -> None:
    ends = [0.0, *itertools.accumulate(passes_s * 6)]
    intervals = [
        [("forward", "backward")[number % 2], number // 2, *span]
        for number, span in enumerate(itertools.pairwise(ends))
    ]
    intervals.append(["all-reduce", 0, 0.0, ends[6]])
    document = {
        "format": "pipeplan-timeline",
        "version": 1,
        "plan": plan,
        "rank": worker,
        "stage": stage,
        "replica": replica,
        "epoch": 1,
        "first": 0,
        "minibatches": 6,
        "epoch_minibatches": 6,
        "intervals": intervals,
    }
    path = folder / "timeline" / f"rank-{worker}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))


HOSTILE = '<img src=x onerror="window.hit=1"></script><script>window.hit=1</script>{{7*7}}'
STRAIGHT = Options(max_replicas=1, allow_copies=False, schedule="1f1b-stashing")
SLOWER = 1.25


def with_run(source: ReportSource) -> Document:
    """The report on a plan and a run of it, whose timeline is the predicted one drawn out."""
    with tempfile.TemporaryDirectory() as folder:
        run = read_run(write_run(Path(folder) / "run", source, slower=SLOWER, timelines=False))
        document = build_report(source, run).to_json()
    timeline = document["timeline"]
    stretched = {name: [SLOWER * value for value in timeline["predicted"][name]] for name in ("start_s", "end_s")}
    measured = timeline["predicted"] | stretched
    return document | {"timeline": timeline | {"measured": measured, "measured_end_s": max(stretched["end_s"])}}


def hostile() -> Document:
    """Every name that a user's file may hold is an attack."""
    profile = branching()

    def renamed(name: str) -> str:
        return f"{name}{HOSTILE}"

    profile = replace(
        profile,
        model_name=HOSTILE,
        provenance=replace(profile.provenance, how=HOSTILE, device_name=HOSTILE),
        layers=tuple(replace(one, name=renamed(one.name), op=HOSTILE) for one in profile.layers),
        tensors=tuple(
            replace(one, producer=renamed(one.producer), consumers=tuple(map(renamed, one.consumers)))
            for one in profile.tensors
        ),
    )
    return with_run(source_of(profile, replace(small_cluster(), name=HOSTILE), STRAIGHT))


def big() -> Document:
    """1,000 layers on 1,024 workers."""
    layers = tuple(Layer(f"l{i}", 1e-3, 2e-3, 10**6, 10**6) for i in range(1000))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 10**4, 10**4) for i in range(999))
    profile = Profile(layers=layers, tensors=tensors, minibatch=1, model_name="long")
    return report_of(source_of(profile, small_cluster(128, 8), Options(memory=False)))


_MAKERS: dict[str, Callable[[], Document]] = {
    "plan": lambda: report_of(source_of(vgg(), "B", Options(schedule="1f1b-stashing"))),
    "run": lambda: with_run(source_of(branching(), small_cluster(), STRAIGHT)),
    "inference": lambda: report_of(source_of(branching(), small_cluster(), Options(inference=True))),
    "one-stage": lambda: report_of(source_of(branching(), small_cluster(), Options(stages=1))),
    "many-stages": lambda: report_of(
        source_of(branching(150), small_cluster(8, 2), replace(STRAIGHT, stages=16, memory=False))
    ),
    "hostile": hostile,
    "big": big,
}
KINDS = tuple(_MAKERS)


@functools.cache
def _made(kind: str) -> Document:
    return _MAKERS[kind]()


def document_of_kind(kind: str) -> Document:
    """A document of this kind, to be changed freely."""
    return copy.deepcopy(_made(kind))
