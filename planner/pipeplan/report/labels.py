"""Labels and quantities in the texts of a report: its title, cluster, configurations, times and shares."""

from __future__ import annotations

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.drawing.words import describe_cluster
from pipeplan.report.source import ReportSource
from pipeplan.util.text import one_line
from pipeplan.util.units import show_time

MAX_CONFIG_LENGTH = 24
"""Most characters of a configuration. A longer one is described by its number of stages."""


def report_title(source: ReportSource) -> str:
    """Title of the report: model, configuration and cluster."""
    model = one_line(source.root["profile"]["model"].text()) or "a model"
    return f"{model} as {short_config(source.plan.config)} on cluster {one_line(source.cluster.name)}"


def cluster_text(cluster: Cluster) -> str:
    """The devices of a cluster in words."""
    return describe_cluster(cluster)


def short_config(text: str) -> str:
    """A configuration, or its number of stages if it is long."""
    text = one_line(text)
    return text if len(text) <= MAX_CONFIG_LENGTH else f"{text.count('-') + 1} stages"


def time_text(seconds: float) -> str:
    """A time in seconds if it is one second or longer, else in milliseconds or microseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else show_time(seconds)


def percent_text(share: float) -> str:
    """A share in whole percent. A small share is `<1%`, so that it does not look like none."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def capitalised(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]
