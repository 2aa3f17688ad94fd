"""Experiments: every row predicted again with one assumption changed.

Each variant changes one assumption for all rows, fits the links anew on the VGG-16 rows, and predicts the others. In
addition, for each row, one link's rate is solved for that would give the published speed-up, all else as predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeplan.profile_data.profile import Profile
from table1 import profile_changes
from table1.efficiencies import ALLREDUCE, MESSAGES, Efficiency, fit_efficiencies, solve_share
from table1.published import PublishedRow
from table1.rows import Case

ADAM = {"gnmt8": 2.0, "gnmt16": 2.0}
"""Numbers per weight that the optimiser keeps, by profile; the other models train with SGD."""

COARSE = 14
"""Halvings for a share that is printed with two digits."""

ProfileChange = Callable[[PublishedRow, Profile], Profile]


def _unchanged(row: PublishedRow, profile: Profile) -> Profile:
    return profile


def _with_step(row: PublishedRow, profile: Profile) -> Profile:
    return profile_changes.with_step(profile, ADAM, row)


def _repaired_with_step(row: PublishedRow, profile: Profile) -> Profile:
    return _with_step(row, profile_changes.repaired(row, profile))


@dataclass(frozen=True)
class Variant:
    """One changed assumption, for all rows. The title names it in the table."""

    title: str
    text: str
    change: ProfileChange = _unchanged
    hidden: bool = True
    """Whether data parallelism hides its all-reduce behind compute."""


VARIANTS = (
    Variant("step", "the optimiser's step after every minibatch, which the profiles lack", _with_step),
    Variant(
        "repaired",
        "GNMT's published profiles with backward times where they belong and sizes of as many words as the times",
        profile_changes.repaired,
    ),
    Variant(
        "awaited", "data parallelism hides nothing of its all-reduce, not even behind the backward pass", hidden=False
    ),
    Variant("all", "all three together", _repaired_with_step, hidden=False),
)


@dataclass(frozen=True)
class RequiredRates:
    """The rates in bytes/s at which one link would give the published speed-up; None where none up to nominal does."""

    allreduce: float | None
    """Of data parallelism's all-reduce."""
    gain_at_nominal: float
    """The predicted speed-up if the all-reduce reached the nominal rate."""
    messages: float | None


@dataclass(frozen=True)
class Experiment:
    """One row under every variant."""

    name: str
    gains: Mapping[str, float]
    """Predicted speed-up over data parallelism, by the title of the variant."""
    required: RequiredRates


def gain_with(
    profiles: Mapping[str, Profile], variant: Variant
) -> Callable[[PublishedRow, Sequence[Efficiency]], float]:
    """A function that predicts a row's speed-up under a variant. `profiles` are by the names of the rows."""
    cases: dict[str, Case] = {}

    def gain(row: PublishedRow, efficiencies: Sequence[Efficiency]) -> float:
        if row.name not in cases:
            cases[row.name] = Case(row, variant.change(row, profiles[row.name]))
        return cases[row.name].gain(efficiencies, hidden=variant.hidden)

    return gain


def run_experiments(
    rows: Sequence[PublishedRow],
    fitted: Mapping[str, PublishedRow],
    profiles: Mapping[str, Profile],
    efficiencies: Sequence[Efficiency],
    report: Callable[[str], None] = lambda step: None,
) -> list[Experiment]:
    """Every row that has a pipeline, under every variant. The links are fitted to the rows `fitted`, by cluster."""
    pipelines = [row for row in rows if not row.data_parallel]
    if not pipelines:
        return []
    gains: dict[str, dict[str, float]] = {row.name: {} for row in pipelines}
    for variant in VARIANTS:
        gain = gain_with(profiles, variant)
        refitted = fit_efficiencies(fitted, gain)
        for row in pipelines:
            report(f"{row.name}: {variant.title}")
            gains[row.name][variant.title] = gain(row, refitted)
    return [
        Experiment(row.name, gains[row.name], required_rates(row, profiles[row.name], efficiencies))
        for row in pipelines
    ]


def required_rates(row: PublishedRow, profile: Profile, efficiencies: Sequence[Efficiency]) -> RequiredRates:
    """The rate that each operation on the row's main link would need, one at a time."""
    case = Case(row, profile)
    allreduce, messages = (_link_of(row, efficiencies, operation) for operation in (ALLREDUCE, MESSAGES))

    def gain_by_allreduce(share: float) -> float:
        return case.gain(_with_share(efficiencies, allreduce, share))

    def loss_by_messages(share: float) -> float:
        return -case.gain(_with_share(efficiencies, messages, share))

    allreduce_share = solve_share(row.speedup, gain_by_allreduce, steps=COARSE)
    messages_share = solve_share(-row.speedup, loss_by_messages, steps=COARSE)
    return RequiredRates(
        allreduce=None if allreduce_share is None else allreduce_share * allreduce.nominal,
        gain_at_nominal=gain_by_allreduce(1.0),
        messages=None if messages_share is None else messages_share * messages.nominal,
    )


def _with_share(efficiencies: Sequence[Efficiency], which: Efficiency, share: float) -> tuple[Efficiency, ...]:
    return tuple(replace(one, share=share) if one == which else one for one in efficiencies)


def _link_of(row: PublishedRow, efficiencies: Sequence[Efficiency], operation: str) -> Efficiency:
    """The link that a row's data parallelism is bound by: between servers, or inside the only one."""
    level = "server" if row.servers == 1 else "cluster"
    wanted = row.cluster, level, operation
    return next(one for one in efficiencies if (one.cluster, one.level, one.operation) == wanted)
