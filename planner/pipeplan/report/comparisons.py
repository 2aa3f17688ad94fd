"""The plan beside other ways to use the cluster."""

from __future__ import annotations

from pipeplan.explain.alternatives import Alternatives
from pipeplan.report.document import Comparison
from pipeplan.report.source import Source
from pipeplan.text import one_line


def comparisons(source: Source, others: Alternatives | None) -> list[Comparison]:
    """This plan, the baselines that plan.json has, and the runner-up where it was looked for."""
    found = [Comparison("this plan", source.plan.config, source.pace_s, 1.0, "")]
    for said in source.root["baselines"].items():
        pace, gain = said.get("minibatch_s"), said.get("gain")
        found.append(
            Comparison(
                one_line(said["name"].text()),
                one_line(said["config"].text()),
                pace.number() if pace else None,
                gain.number() if gain else None,
                one_line(said["remark"].text()),
            )
        )
    if others is not None and others.second is not None:
        second = others.second
        remark = "the best plan of another configuration" if others.exact else "the best other that was found"
        found.append(Comparison("runner-up", second.plan.config, second.pace_s, 1 + second.behind, remark))
    return found
