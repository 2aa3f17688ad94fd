"""The plan beside other ways to use the cluster.

How the pace grows with the cluster: the best plan for other numbers of servers, or of workers of one server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.explanation.second_best import Alternatives, find_alternatives
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import data_parallelism
from pipeplan.planning.fast import ScoredPlan, best_plan
from pipeplan.planning.verdict import TOLERANCE
from pipeplan.problem.cuts import Cuts
from pipeplan.report.document import Comparison, columns
from pipeplan.report.source import Known, Source
from pipeplan.util.text import one_line

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
    return find_alternatives(known.problem, cuts, source.plan, source.pace_s, each=thorough)


def config(text: str) -> str:
    """A configuration as people write it, a long one in short."""
    text = one_line(text)
    return text if len(text) <= SHORT else f"{text.count('-') + 1} stages"


MOST_WORKERS = 8192
_NAMES = ("servers", "workers", "minibatch_s", "samples_per_s", "config", "data_parallelism_s", "fits")


def scaling(known: Known, cuts: Cuts, plan: Plan, pace_s: float) -> dict[str, Any] | None:
    """The best plans that the dynamic program finds, and data parallelism; None where the cluster has no other size.

    The plan's own cluster has the plan itself and its pace.
    """
    here, rows = known.problem.cluster, []
    smaller: Plan | None = None
    for cluster in _sizes(here):
        own = cluster.workers == here.workers
        try:
            problem = replace(known.problem, cluster=cluster)
            # Where cards are shared a larger cluster's own plan need not be as good as one that leaves workers idle.
            found = ScoredPlan(plan, pace_s) if own else best_plan(problem, cuts, smaller)
        except InputError:
            continue
        pace = found.pace_s if found is not None else None
        smaller = found.plan if found is not None and cluster.workers >= here.workers else None
        beside = data_parallelism(problem)
        rows.append(
            (
                cluster.servers,
                cluster.workers,
                pace,
                known.profile.minibatch / pace if pace else None,
                config(found.plan.config) if found is not None else "",
                beside.pace_s,
                not beside.remark,
            )
        )
    if len(rows) < 2:
        return None
    return {"points": columns(_NAMES, rows), "here": [row[1] for row in rows].index(here.workers)}


def _sizes(cluster: Cluster) -> Iterator[Cluster]:
    """Powers of two up to twice its size, and its own; of one server, of its workers and not beyond them."""
    if cluster.servers == 1 and cluster.uniform:
        inner, *above = cluster.levels
        for count in _counts(inner.count, inner.count):
            yield replace(cluster, levels=(replace(inner, count=count), *above))
        return
    for count in _counts(cluster.servers, 2 * cluster.servers):
        try:
            found = cluster.with_servers(count)
        except InputError:
            continue
        if found.workers <= max(MOST_WORKERS, cluster.workers):
            yield found


def _counts(own: int, most: int) -> list[int]:
    return sorted({own, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
