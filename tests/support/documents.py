"""Documents of real reports, of every kind of plan that the page must show, with hostile names too."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from reported import Document, branching, report_of, small_cluster, source_of, vgg, write_run

from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.report.build import build_report
from pipeplan.report.source import ReportSource
from pipeplan.run_data.run_folder import read_run

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
