"""The plan beside other ways to use the cluster."""

from __future__ import annotations

from pipeplan.cuts import Cuts
from pipeplan.explain.alternatives import Alternatives, alternatives
from pipeplan.report.document import Comparison
from pipeplan.report.source import Known, Source
from pipeplan.text import one_line
from pipeplan.verdict import TOLERANCE

SHORT = 24
"""Characters of a configuration; a longer one is told by its number of stages."""


def comparisons(source: Source, others: Alternatives | None) -> list[Comparison]:
    """This plan, the baselines that plan.json has, and the runner-up where it was looked for."""
    found = [Comparison("this plan", config(source.plan.config), source.pace_s, 1.0, "")]
    for said in source.root["baselines"].items():
        pace, gain = said.get("minibatch_s"), said.get("gain")
        found.append(
            Comparison(
                one_line(said["name"].text()),
                config(said["config"].text()),
                pace.number() if pace else None,
                gain.number() if gain else None,
                one_line(said["remark"].text()),
            )
        )
    if others is not None and others.second is not None:
        second = others.second
        remark = "the best plan of another configuration" if others.exact else "the best other plan that was found"
        if abs(second.behind) <= TOLERANCE:
            remark = "as fast, in another configuration"
        found.append(Comparison("runner-up", config(second.plan.config), second.pace_s, 1 + second.behind, remark))
    return found


def runner_up(source: Source, known: Known, cuts: Cuts, *, thorough: bool) -> Alternatives:
    """The best plan of another configuration: among the few likely kinds of plans, or all if `thorough`."""
    return alternatives(known.problem, cuts, source.plan, source.pace_s, each=thorough)


def config(text: str) -> str:
    """A configuration as people write it, a long one in short."""
    text = one_line(text)
    return text if len(text) <= SHORT else f"{text.count('-') + 1} stages"
