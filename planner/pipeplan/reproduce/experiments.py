"""What would have to be otherwise for a prediction to be what was published: every row under every change.

Each variant changes one thing for all rows, fits the links anew on the VGG-16 rows, and predicts the others. Then,
row by row, what one link would have to carry, all else as predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.profile_data import Profile
from pipeplan.reproduce import changes
from pipeplan.reproduce.efficiencies import ALLREDUCE, MESSAGES, Efficiency, fit, solve_share
from pipeplan.reproduce.published import Published
from pipeplan.reproduce.rows import Case

ADAM = {"gnmt8": 2.0, "gnmt16": 2.0}
"""Rows whose optimiser keeps two numbers a weight; the others keep one or none."""

COARSE = 14
"""Halvings of a share that is only told to two digits."""

Change = Callable[[Published, Profile], Profile]


def _as_it_is(row: Published, profile: Profile) -> Profile:
    return profile


def _stepping(row: Published, profile: Profile) -> Profile:
    return changes.with_step(profile, ADAM, row)


def _repaired_stepping(row: Published, profile: Profile) -> Profile:
    return _stepping(row, changes.repaired(row, profile))


@dataclass(frozen=True)
class Variant:
    """One thing otherwise, for all rows."""

    key: str
    title: str
    text: str
    change: Change = _as_it_is
    hidden: bool = True
    """Whether data parallelism hides its all-reduce behind compute."""


VARIANTS = (
    Variant("step", "step", "the optimiser's step after every minibatch, which the profiles lack", _stepping),
    Variant(
        "repaired",
        "repaired",
        "GNMT's published profiles with backward times where they belong and sizes of as many words as the times",
        changes.repaired,
    ),
    Variant(
        "awaited",
        "awaited",
        "data parallelism hides nothing of its all-reduce, not even behind the backward pass",
        hidden=False,
    ),
    Variant("all", "all", "all three together", _repaired_stepping, hidden=False),
)


@dataclass(frozen=True)
class Needs:
    """What one link would have to carry for the published gain, bytes/s; None where no rate up to nominal gives it."""

    allreduce: float | None
    """In data parallelism, where it is now predicted at `allreduce_now`."""
    allreduce_now: float
    gain_at_nominal: float
    """Predicted, if the all-reduce reached the nominal rate."""
    messages: float | None
    messages_now: float


@dataclass(frozen=True)
class Trial:
    """One row under every change."""

    name: str
    gains: Mapping[str, float]
    """By the key of the variant."""
    needs: Needs


def gain_with(profiles: Mapping[str, Profile], variant: Variant) -> Callable[[Published, Sequence[Efficiency]], float]:
    """What predicts a row's gain under a variant, from the profiles by the names of the rows."""

    cases: dict[str, Case] = {}

    def gain(row: Published, known: Sequence[Efficiency]) -> float:
        if row.name not in cases:
            cases[row.name] = Case(row, variant.change(row, profiles[row.name]))
        return cases[row.name].gain(known, hidden=variant.hidden)

    return gain


def try_all(
    rows: Sequence[Published],
    fitted: Mapping[str, Published],
    profiles: Mapping[str, Profile],
    known: Sequence[Efficiency],
    step: Callable[[str], None] = lambda what: None,
) -> list[Trial]:
    """Every row that has a pipeline, under every variant. `fitted` are the rows that links are fitted to."""
    asked = [row for row in rows if not row.parallel]
    if not asked:
        return []
    gains: dict[str, dict[str, float]] = {row.name: {} for row in asked}
    for variant in VARIANTS:
        gain = gain_with(profiles, variant)
        links = fit(fitted, gain)
        for row in asked:
            step(f"{row.name}: {variant.title}")
            gains[row.name][variant.key] = gain(row, links)
    return [Trial(row.name, gains[row.name], needs_of(row, profiles[row.name], known)) for row in asked]


def needs_of(row: Published, profile: Profile, known: Sequence[Efficiency]) -> Needs:
    """What the links of a row would have to carry, one at a time."""
    case = Case(row, profile)
    allreduce, messages = (link_of(row, known, operation) for operation in (ALLREDUCE, MESSAGES))

    def by_allreduce(share: float) -> float:
        return case.gain(with_share(known, allreduce, share))

    def by_messages(share: float) -> float:
        return -case.gain(with_share(known, messages, share))

    share = solve_share(row.speedup, by_allreduce, steps=COARSE)
    rate = solve_share(-row.speedup, by_messages, steps=COARSE)
    return Needs(
        None if share is None else share * allreduce.nominal,
        allreduce.rate,
        by_allreduce(1.0),
        None if rate is None else rate * messages.nominal,
        messages.rate,
    )


def with_share(known: Sequence[Efficiency], which: Efficiency, share: float) -> tuple[Efficiency, ...]:
    """The same, with another share for one of them."""
    return tuple(replace(one, share=share) if one == which else one for one in known)


def link_of(row: Published, known: Sequence[Efficiency], operation: str) -> Efficiency:
    """The link that a row's data parallelism goes over: between servers, or inside the only one."""
    level = "server" if row.servers == 1 else "cluster"
    return next(one for one in known if (one.cluster, one.level, one.operation) == (row.cluster, level, operation))


def at_rate(row: Published, known: Sequence[Efficiency], operation: str, rate: float) -> tuple[Efficiency, ...]:
    """The same, with an operation at that rate on that link, bytes/s."""
    which = link_of(row, known, operation)
    return with_share(known, which, rate / which.nominal)
