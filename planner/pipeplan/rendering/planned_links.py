"""The rates that a plan was made for, as stage files say them: the executor compares them with what it finds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeplan import contention
from pipeplan.links import Links

if TYPE_CHECKING:
    from pipeplan.solving import Outcome


def planned_links(outcome: Outcome) -> list[dict[str, Any]]:
    """For every level, innermost first: who it joins, at which rates, and how busy the plan keeps each server's card.

    What differs between components of a level is a list over these; a rate without bounds is null.
    """
    problem = outcome.problem
    cluster, links = problem.cluster, Links.of(problem.cluster)
    busy = contention.loads(outcome.plan, problem, links).busy_s
    found = []
    for number, level in enumerate(cluster.levels, start=1):
        rates = links.rates[number]
        # A card belongs to what the level joins: servers, and whatever holds several of them.
        cards = busy[number - 1].max(axis=0).tolist() if number > cluster.server_level else None
        found.append(
            {
                "name": level.name,
                "span": _one_or_all(np.diff(np.array(cluster.starts(number))).tolist()),
                "sendrecv": _one_or_all([_finite(rate) for rate in rates.sendrecv.tolist()]),
                "allreduce": _one_or_all([_finite(rate) for rate in rates.allreduce.tolist()]),
                "latency_s": _one_or_all(rates.latency.tolist()),
                "cards_s": None if cards is None else _one_or_all(cards),
            }
        )
    return found


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _one_or_all(values: list[Any]) -> Any:
    """One value where all are the same."""
    return values[0] if all(value == values[0] for value in values) else values
