"""Builds the report on a plan from its sections, and the page that shows it.

The page is a single HTML file that contains its styles, its scripts and the document, and needs no network.
"""

from __future__ import annotations

import json
from typing import Any

from pipeplan._version import __version__
from pipeplan.cost.throughput import Throughput
from pipeplan.explanation.second_best import Alternatives
from pipeplan.plan.learning_cost import known_learning
from pipeplan.plan.updates import Updates
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.rendering import templates
from pipeplan.report import (
    bounds,
    comparisons,
    labels,
    links,
    measured,
    model_graph,
    stages,
    text_alternative,
    timeline,
)
from pipeplan.report.document import PlanReport
from pipeplan.report.source import ProfiledProblem, ReportSource
from pipeplan.report.timeline import simulate_for_report
from pipeplan.run_data.run_folder import MeasuredRun
from pipeplan.util import files
from pipeplan.util.text import one_line
from pipeplan.util.typed import decode

MAX_SERVERS = 256
"""Most servers whose workers are listed."""
MAX_CUTS = 50_000
"""Most cuts that are enumerated."""
QUICK_RUNNER_UP, QUICK_SCALING = 1_000, 5_000
"""Largest number of cuts times workers at which the runner-up, and plans for other numbers of servers, are searched for
without `--thorough`. The search then takes some tenths of a second."""
# Characters that could end the script element around the document, or begin another. JSON parsers read the escapes
# as the same characters.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def build_report(source: ReportSource, run: MeasuredRun | None = None, *, thorough: bool = False) -> PlanReport:
    """The report on a plan, and on a run of it if there is one.

    With `thorough`, searches that may take minutes are made too.
    """
    simulated = simulate_for_report(source.scenario)
    shown = timeline.pipeline_timeline(simulated, run)
    alternatives, curve = _searched(source, thorough)
    report = PlanReport(
        title=labels.report_title(source),
        pipeplan=__version__,
        made=plan_facts(source),
        prediction=predicted_pace(source) | {"bounds": bounds.bound_rows(source)[: bounds.MAX_BOUNDS]},
        measured=None if run is None else measured.measured_section(run),
        stages=stages.stage_rows(source),
        graph=model_graph.model_graph(source),
        placement=stages.placement_rows(source, MAX_SERVERS),
        timeline=shown,
        links=links.link_rows(source, simulated, measured.allreduce_shares(run) if run is not None else {})[
            : links.MAX_LINKS
        ],
        memory=stages.memory_rows(
            source, simulated, shown.end_s, measured.measured_peaks(run) if run is not None else {}
        ),
        comparisons=comparisons.comparison_rows(source, alternatives),
        scaling=curve,
        certificate=bounds.certificate_section(source),
        words={},
        notes=[],
    )
    return text_alternative.with_text(report, source, simulated, run, alternatives)


def _searched(source: ReportSource, thorough: bool) -> tuple[Alternatives | None, dict[str, Any] | None]:
    """The runner-up and the scaling curve; None for a search that would take too long."""
    known = source.known
    if known is None:
        return None, None
    if not thorough and len(known.problem.units) * known.problem.cluster.workers > QUICK_SCALING:
        return None, None
    cuts = enumerate_cuts(known.problem, MAX_CUTS)
    alternatives = curve = None
    if thorough or _size(known, cuts) <= QUICK_RUNNER_UP:
        alternatives = comparisons.find_runner_up(source, known, cuts, thorough=thorough)
    if thorough or _size(known, cuts) <= QUICK_SCALING:
        curve = comparisons.scaling_points(known, cuts, source.plan, source.pace_s)
    return alternatives, curve


def _size(known: ProfiledProblem, cuts: Cuts) -> int:
    return len(cuts.ideals) * known.problem.cluster.workers


def plan_facts(source: ReportSource) -> dict[str, Any]:
    """The origin of the figures, and the model, cluster and schedule of the plan."""
    profile = source.root["profile"]
    minibatch = profile["minibatch"].integer(minimum=1)
    return {
        "model": one_line(profile["model"].text()),
        "minibatch": minibatch,
        "profile_kind": one_line(profile["kind"].text()),
        "profile_how": one_line(profile["how"].text()),
        "profile_device": one_line(source.known.profile.provenance.device_name) if source.known else "",
        "cluster": one_line(source.cluster.name),
        "cluster_described": labels.cluster_text(source.cluster),
        "workers": source.cluster.workers,
        "busy": source.plan.busy,
        "config": labels.short_config(source.plan.config),
        "copies": source.plan.copies,
        "schedule": source.root["plan"]["schedule"].text(),
        "accumulate": source.plan.accumulate,
        "updates": "" if source.plan.inference else Updates.of(source.plan, minibatch).text,
        "learning": _learning(source),
        "mode": "inference" if source.plan.inference else "training",
        "pipeplan": one_line(source.root["pipeplan"].text()),
        "digest": profile["digest"].text(),
    }


def _learning(source: ReportSource) -> str:
    """The measured cost of learning with gradients as old as the plan's; empty for a synchronous plan."""
    if source.known is None:
        return ""
    profile, options = source.known.profile, source.known.problem.options
    known = known_learning(source.plan, profile.optimizer_name, profile.optimizer_state_ratio, options.correction)
    return "" if known is None else one_line(known.text)


def predicted_pace(source: ReportSource) -> dict[str, Any]:
    """The stated pace, that of the formulas, and the resource that bounds that."""
    pace = source.step_s
    samples = source.root["profile"]["minibatch"].integer(minimum=1)
    return {
        "minibatch_s": pace,
        "formulas_s": source.pace_s,
        "minibatches_per_s": 1 / pace if pace else None,
        "samples_per_s": samples / pace if pace else None,
        "bound_by": one_line(source.root["prediction"]["bound_by"].text()),
        "in_units": _throughput_lines(source),
    }


def _throughput_lines(source: ReportSource) -> list[str]:
    """Tokens per second, share of the peak, prices and hours, as far as plan.json knows them."""
    node = source.root.get("throughput")
    return [] if node is None else [one_line(line) for line in decode(node, Throughput).lines]


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
        title=document["title"], document=script_safe_json(document), **parts
    )
