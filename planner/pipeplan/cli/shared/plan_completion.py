"""Completion of the names of servers and workers of a plan, for `replan --lost` and `replay --fault`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from pipeplan.errors import InputError

MOST = 64
"""At most so many servers and workers are listed."""


def complete_lost(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete `server2` and `worker5`, also the last of several with commas."""
    before, comma, begun = incomplete.rpartition(",")
    names = [name for kind, count in _counts(context) for name in _numbered(kind, count)]
    return [CompletionItem(f"{before}{comma}{name}") for name in names if name.startswith(begun)]


def complete_fault(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete `cut:server1`, `flap:server1`, `kill:worker3` and `freeze:worker3`."""
    from pipeplan.replay.faults import OF_CABLES, OF_WORKERS

    faults = {"server": OF_CABLES, "worker": OF_WORKERS}
    named = [(kind, name) for kind, count in _counts(context) for name in _numbered(kind, count)]
    words = [f"{fault}:{name}" for kind, name in named for fault in faults[kind]]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _numbered(kind: str, count: int) -> Iterator[str]:
    return (f"{kind}{number}" for number in range(min(count, MOST)))


def _counts(context: click.Context) -> list[tuple[str, int]]:
    """The numbers of servers and workers of the plan that the command line names; none if it cannot be read."""
    from pipeplan.cluster_data.cluster_json import cluster_from_json
    from pipeplan.problem.plan_file import read_plan_document

    # Click leaves the arguments before an option without a value in `args`.
    folder = context.params.get("plan_folder") or next(map(Path, context.args), Path("plan"))
    try:
        cluster = cluster_from_json(read_plan_document(folder)["cluster"])
    except InputError:
        return []
    return [("server", cluster.servers), ("worker", cluster.workers)]
