"""The link rates that a plan was made for. Stage files hold them, and the executor compares them with its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeplan import contention
from pipeplan.links import Links

if TYPE_CHECKING:
    from pipeplan.solving import Outcome


def planned_links(outcome: Outcome) -> list[dict[str, Any]]:
    """The levels of the cluster, innermost first: what each joins, its rates, and how long the plan keeps cards busy.

    `span` is the number of components that a component of the level joins. `sendrecv` and `allreduce` are in bytes per
    second, null if unlimited. `cards_s` is in seconds per minibatch for one network card. A value is a list over the
    components of the level where these differ.
    """
    problem = outcome.problem
    cluster, links = problem.cluster, Links.of(problem.cluster)
    busy = contention.loads(outcome.plan, problem, links).busy_s
    documents = []
    for number, level in enumerate(cluster.levels, start=1):
        rates = links.rates[number]
        # Network cards belong to the components that a level joins: to servers, and to groups of servers.
        cards = busy[number - 1].max(axis=0).tolist() if number > cluster.server_level else None
        documents.append(
            {
                "name": level.name,
                "span": _one_or_all(np.diff(np.array(cluster.starts(number))).tolist()),
                "sendrecv": _one_or_all([_finite(rate) for rate in rates.sendrecv.tolist()]),
                "allreduce": _one_or_all([_finite(rate) for rate in rates.allreduce.tolist()]),
                "latency_s": _one_or_all(rates.latency.tolist()),
                "cards_s": None if cards is None else _one_or_all(cards),
            }
        )
    return documents


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _one_or_all(values: list[Any]) -> Any:
    """The value that all have in common, or else all values."""
    return values[0] if all(value == values[0] for value in values) else values
