"""Builds the report on a plan from its sections, and the page that shows it.

The page is a single HTML file that contains its styles, its scripts and the document, and needs no network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import asdict

from pipeplan._version import __version__
from pipeplan.cost.throughput import Throughput
from pipeplan.drawing.answer import learning_summary, training_manner
from pipeplan.drawing.model_graph import ModelGraph, layer_groups, model_graph
from pipeplan.drawing.tables import describe_cluster
from pipeplan.plan.learning_cost import known_learning
from pipeplan.plan.schedules import INFERENCE
from pipeplan.plan.updates import Updates
from pipeplan.rendering import templates
from pipeplan.report import comparisons, loads, sentences, stages, timeline
from pipeplan.report.comparisons import short_config
from pipeplan.report.document import PlanReport
from pipeplan.report.source import ReportSource
from pipeplan.run_data.run_folder import ALL_REDUCE, MeasuredRun, StageSummary
from pipeplan.util import files
from pipeplan.util.text import one_line
from pipeplan.util.typed import decode
from pipeplan.util.units import show_size, show_time

COMPARED_FIGURES = ("forward_s", "backward_s", "update_s", "sync_s", "wait_s", "memory_bytes")
"""Figures of a stage that are both predicted and measured."""
MEASURED_FIGURES = ("load_s", "send_s", "other_s")
"""Figures of a stage that are only measured."""
MAX_NAME_LENGTH = 18
"""Largest number of characters of a name in a box. The tooltip shows the full name."""
# Characters that could end the script element around the document, or begin another one. JSON parsers read the escapes
# as the same characters.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def build_report(source: ReportSource, run: MeasuredRun | None = None) -> PlanReport:
    """The report on a plan, and on a run of it if there is one.

    Raises `InputError` if the run is a run of another plan.
    """
    simulated = timeline.simulate_for_report(source.scenario)
    shown = timeline.pipeline_timeline(simulated, run)
    made = plan_facts(source)
    report = PlanReport(
        title=f"{made['model'] or 'a model'} on {made['cluster']}: {made['name']}",
        pipeplan=__version__,
        made=made,
        prediction=predicted_figures(source),
        measured=None if run is None else _measured(run),
        stages=stages.stage_rows(source),
        graph=_graph(source),
        placement=stages.placement_rows(source),
        timeline=shown,
        memory=stages.memory_rows(source, simulated, shown.end_s, run),
        loads=loads.load_rows(source, simulated, {} if run is None else _allreduce_shares(run)),
        comparisons=comparisons.comparison_rows(source),
        certificate=comparisons.certificate_section(source),
        words={},
        notes=[],
    )
    words = sentences.section_sentences(report, source, simulated, run)
    return replace(report, words=words, notes=list(sentences.report_notes(report, source)))


def _graph(source: ReportSource) -> ModelGraph:
    """The drawing of the model, whose layers are grouped by stage."""
    stage_of = {name: index for index, stage in enumerate(source.plan.stages) for name in stage.layers}
    return model_graph(source.problem.profile, *layer_groups(source.problem.profile, stage_of))


def plan_facts(source: ReportSource) -> dict[str, Any]:
    """The origin of the figures, and the model, cluster and schedule of the plan."""
    profile, plan = source.stated.profile, source.plan
    return {
        "model": one_line(profile.model),
        "minibatch": source.microbatch,
        "profile_kind": one_line(profile.kind),
        "profile_how": one_line(profile.how),
        "profile_device": one_line(source.problem.profile.provenance.device_name),
        "cluster": one_line(source.problem.cluster.name),
        "cluster_described": describe_cluster(source.problem.cluster),
        "workers": source.problem.cluster.workers,
        "busy": plan.busy,
        "name": source.name,
        "data_parallel": source.stated.data_parallel,
        "manner": training_manner(plan, source.microbatch),
        "config": short_config(plan.config),
        "copies": plan.copies,
        "schedule": INFERENCE if plan.inference else plan.schedule,
        "accumulate": plan.accumulate,
        "updates": "" if plan.inference else Updates.of(plan, source.microbatch).text,
        "learning": _learning(source),
        "mode": "inference" if plan.inference else "training",
        "pipeplan": one_line(source.stated.pipeplan),
        "digest": profile.digest,
    }


def _learning(source: ReportSource) -> str:
    """The measured cost of learning with gradients as old as the plan's; empty for a synchronous plan."""
    profile, options = source.problem.profile, source.problem.options
    known = known_learning(source.plan, profile.optimizer_name, profile.optimizer_state_ratio, options.correction)
    return "" if known is None else one_line(learning_summary(known))


def predicted_figures(source: ReportSource) -> dict[str, Any]:
    """The step time, its value by the formulas, the limiting resource, and the throughput in other units."""
    step_s, node = source.stated.step_s, source.root.get("throughput")
    return {
        "minibatch_s": step_s,
        "formulas_s": source.step_time_s,
        "minibatches_per_s": 1 / step_s if step_s else None,
        "samples_per_s": source.microbatch / step_s if step_s else None,
        "bound_by": source.bound,
        "in_units": [] if node is None else [one_line(line) for line in decode(node, Throughput).lines],
    }


def _measured(run: MeasuredRun) -> dict[str, Any]:
    """The measured step time, the first cause of its difference from the prediction, and the figures of every stage."""
    summary, step = run.summary, run.summary.minibatch_s
    return {
        "run": one_line(run.folder.name),
        "minibatch_s": step.measured,
        "minibatches_per_s": 1 / step.measured if step.measured else None,
        "samples_per_s": summary.minibatch / step.measured if step.measured and summary.minibatch else None,
        "ratio": step.ratio,
        "minibatches": summary.steady_minibatches,
        "includes_fill": summary.includes_fill,
        "cause": one_line(summary.cause.text) if summary.cause else "",
        "stages": [_measured_stage(stage) for stage in summary.stages],
    }


def _measured_stage(stage: StageSummary) -> dict[str, Any]:
    figures = {name: asdict(getattr(stage, name)) for name in COMPARED_FIGURES}
    figures |= {name: getattr(stage.measured, name) for name in MEASURED_FIGURES}
    return {"stage": stage.stage, "workers": list(stage.workers), **figures}


def _allreduce_shares(run: MeasuredRun) -> dict[int, float]:
    """Share of the recorded time in which all-reduces of a stage ran, as the mean over its workers, by stage."""
    end_s = max((interval.end_s for timeline in run.timelines.values() for interval in timeline), default=0.0)
    shares: dict[int, list[float]] = {}
    for recorded in run.recorded.values():
        busy_s = sum(interval.duration_s for interval in recorded.intervals if interval.kind == ALL_REDUCE)
        shares.setdefault(recorded.stage, []).append(busy_s / end_s if end_s else 0.0)
    return {stage: sum(of_workers) / len(of_workers) for stage, of_workers in shares.items()}


def script_safe_json(document: dict[str, Any]) -> str:
    """The document as JSON that is safe inside a script element."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def report_page(document: dict[str, Any]) -> str:
    """The text of the HTML file."""
    folder = files.bundled_folder("templates") / "report"
    parts = {
        kind: "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"*.{kind}")))
        for kind in ("css", "js")
    }
    return templates.load_template("report.html.j2").render(
        title=document["title"],
        document=script_safe_json(document),
        graph=graph_svg(document["graph"], "The layers of the model"),
        **parts,
    )


def graph_svg(graph: Mapping[str, Any], title: str) -> str:
    """A drawing of a model as SVG, from the fields of a `ModelGraph`, with the styles of the page around it."""
    nodes, width = graph["nodes"], graph["w"] - 30
    times = [sum(both) for both in zip(nodes["forward_s"], nodes["backward_s"], strict=True)]
    longest = max(times) or 1.0
    cards = [
        {name: column[at] for name, column in nodes.items()}
        | {
            "share": f"{times[at] / longest * width:.1f}",
            "label": _shortened(nodes["name"][at]),
            "line": one_line(f"{_shortened(nodes['op'][at], 14)} · {show_time(times[at])}"),
            "facts": _facts(nodes, at),
        }
        for at in range(len(times))
    ]
    bends = {int(number): points for number, *points in graph["bends"]}
    path = "".join(_edge_path(graph, edge, bends.get(at, [])) for at, edge in enumerate(graph["edges"]))
    return templates.load_template("graph.svg.j2").render(graph=graph, title=one_line(title), cards=cards, path=path)


def _facts(nodes: Mapping[str, list[Any]], at: int) -> str:
    """The figures of a layer, one group a line."""
    stage = "" if nodes["stage"][at] < 0 else f"stage {nodes['stage'][at] + 1}, "
    times = f"forward {show_time(nodes['forward_s'][at])}, backward {show_time(nodes['backward_s'][at])}"
    sizes = f"parameters {show_size(nodes['parameter_bytes'][at])}, output {show_size(nodes['output_bytes'][at])}"
    name, op = one_line(nodes["name"][at]), one_line(nodes["op"][at])
    return f"{name}\n{stage}{op}\n{times}\n{sizes}"


def _edge_path(graph: Mapping[str, Any], edge: Sequence[int], bends: Sequence[float]) -> str:
    """An edge from the right of its producer, through the bends of a long edge, to the left of its consumer.

    Edges are curves. An edge from the end of a line of ranks to the start of the next one has corners.
    """
    (producer, consumer), nodes, middle = edge, graph["nodes"], graph["h"] / 2
    x, y = nodes["x"][producer] + graph["w"], nodes["y"][producer] + middle
    path = f"M{x:g},{y:g}"
    ends = nodes["x"][consumer], nodes["y"][consumer] + middle
    for to_x, to_y in [*zip(bends[::2], bends[1::2], strict=True), ends]:
        if y == to_y:
            path += f"H{to_x:g}"
        elif to_x > graph["width"]:
            path += f"H{to_x:g}V{to_y:g}"
        elif x < 0:
            path += f"V{to_y:g}H{to_x:g}"
        else:
            half = (x + to_x) / 2
            path += f"C{half:g},{y:g} {half:g},{to_y:g} {to_x:g},{to_y:g}"
        x, y = to_x, to_y
    return path


def _shortened(name: str, most: int = MAX_NAME_LENGTH) -> str:
    name = one_line(name)
    return name if len(name) <= most else "…" + name[1 - most :]
