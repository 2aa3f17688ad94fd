"""The integer program with everything charged against brute force: shared cards and cores, and the wait for updates."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from brute_machines import Instance
from instances import (
    ALL_SCHEDULES,
    crowded_instance,
    drawn,
    mixed_instance,
    unequal_instance,
)
from solver_contract import check_ilp

from pipeplan.problem.problem import Problem

Draw = Callable[..., Instance]
DRAWS: tuple[Draw, ...] = (mixed_instance, unequal_instance, crowded_instance)
KINDS = [(draw, schedule) for draw in DRAWS for schedule in (None, *ALL_SCHEDULES)]
# Uniform clusters on which a stage can reach beyond both ends of a server.
WIDE = [(2, 4), (4, 2), (2, 3), (3, 2), (2, 2, 2), (1, 6), (2, 3, 1)]
_named = pytest.mark.parametrize(("draw", "schedule"), KINDS, ids=lambda what: getattr(what, "__name__", what))


def _charged(seed: int, draw: Draw, schedule: str | None, layers: int) -> tuple[Instance, Problem]:
    """A random problem with contention; workers of two thirds share their server's cores."""
    return drawn(seed, lambda one: replace(draw(one, layers=layers, schedule=schedule), contention=True, cores=one % 3))


def _wide(seed: int, layers: int) -> tuple[Instance, Problem]:
    """A problem on 6 to 8 workers of equal servers, whose cards are slower than the ports inside."""

    def wide(number: int) -> Instance:
        rng = random.Random(f"wide {number}")
        found = mixed_instance(number, layers=layers, schedule=rng.choice(["1f1b-stashing", *ALL_SCHEDULES]))
        rates = sorted((rng.choice([4.0, 8.0, 20.0, 60.0]) for _ in range(3)), reverse=True)
        shape = rng.choice(WIDE)
        levels = [(count, rate, 0.0) for count, rate in zip(shape, rates, strict=False)]
        free = {"max_workers": None, "max_stages": None, "stages": None, "pins": ()}
        return replace(found, **free, levels=levels, contention=True, cores=number % 3)  # type: ignore[arg-type]

    return drawn(seed, wide)


@_named
def test_it_finds_what_brute_force_finds(draw: Draw, schedule: str | None) -> None:
    check_ilp(*_charged(2, draw, schedule, layers=4), ["bounded"])


def test_it_finds_what_brute_force_finds_on_wide_clusters() -> None:
    for seed in range(8):
        check_ilp(*_wide(seed, layers=3), ["bounded"])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40_000, 40_040, 20))
@_named
def test_it_finds_what_brute_force_finds_at_length(draw: Draw, schedule: str | None, start: int) -> None:
    for seed in range(start, start + 20):
        check_ilp(*_charged(seed, draw, schedule, layers=5), ("cold", "bounded") if seed % 5 == 0 else ["bounded"])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(50_000, 50_300, 25))
def test_it_finds_what_brute_force_finds_on_wide_clusters_at_length(start: int) -> None:
    for seed in range(start, start + 25):
        check_ilp(*_wide(seed, layers=4), ("cold", "bounded") if seed % 5 == 0 else ["bounded"])
