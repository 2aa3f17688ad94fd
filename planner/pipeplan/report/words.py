"""What a report says in words."""

from __future__ import annotations

from pipeplan.cluster import Cluster
from pipeplan.report.source import Source
from pipeplan.show import describe
from pipeplan.text import one_line


def title(source: Source) -> str:
    """What the plan is, in a line."""
    model = one_line(source.root["profile"]["model"].text()) or "a model"
    return f"{model} as {source.plan.config} on cluster {one_line(source.cluster.name)}"


def cluster(found: Cluster) -> str:
    """The devices of a cluster."""
    return describe(found)
