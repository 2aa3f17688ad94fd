"""What is printed, as titles, tables and sentences, whatever it is printed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.reproduce import inference
from pipeplan.reproduce.document import errors
from pipeplan.reproduce.experiments import VARIANTS, Trial
from pipeplan.reproduce.published import FITTED, SOURCE, row_of
from pipeplan.reproduce.rows import OFF, Row
from pipeplan.reproduce.table import Table
from pipeplan.solving import Outcome

COLUMNS = (
    "publ., pred.: what was published and what is predicted; the second pred. is that of our plan. proof: ≤ says how"
    " much faster another plan can be at most, where shared cards cost something, which no solver has."
)
RANK = (
    "rank: the paper's among all lists of replica counts, each with its best cuts on consecutive workers, and copies"
    " inside each server; by the pace with every link alone, and no pass that waits for an update, as data"
    " parallelism's does in pred."
)
NEEDS = (
    "a-r, msgs: at which rate all-reduces, or messages, would have to run on that link for what was published, in"
    " GB/s, all else as predicted; – where no rate up to the nominal one gives it."
)


@dataclass(frozen=True)
class Section:
    """A title, sentences, a table, and sentences below it. Columns that end in `>` are numbers, to the right."""

    title: str
    columns: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def sections(table: Table) -> list[Section]:
    """All of the table."""
    found = [_rows(table), _links(table)]
    if table.trials:
        found.append(_experiments(table))
    if table.reasons:
        found.append(_reasons(table))
    found.append(_inference(table))
    return [*found, _replays(table)] if table.replays else found


def _rows(table: Table) -> Section:
    cells = []
    for row in table.rows:
        published = row.published
        cells.append(
            (
                published.name,
                published.cluster,
                _config(row),
                f"{published.speedup:.2f}",
                f"{row.paper.gain:.2f}",
                f"{row.error:+.0%}" + ("*" if row.off else ""),
                f"{row.rank.place:,}",
                row.ours.config,
                f"{row.ours.gain:.2f}",
                _proof(row.outcome),
            )
        )
    estimated = [row.published.name for row in table.rows if not row.source.published]
    sizes = {f"{row.published.profile} {row.source.text}" for row in table.rows if row.source.published}
    what = f"Estimated profiles, no published ones at hand: {', '.join(estimated)}." if estimated else ""
    measured = f"Profiles published by PipeDream's authors: {'; '.join(sorted(sizes))}." if sizes else ""
    return Section(
        "Table 1: times faster than data parallelism",
        ("row", "on", "paper's", "publ.>", "pred.>", "off>", "rank>", "ours", "pred.>", "proof"),
        tuple(cells),
        before=(SOURCE + ".",),
        after=tuple(
            text
            for text in (
                f"Starred: off by more than {OFF:.0%}, reasons below. The rows of VGG-16 are fitted, not predicted."
                if any(row.published.name in FITTED.values() for row in table.rows)
                else f"Starred: off by more than {OFF:.0%}, reasons below.",
                COLUMNS,
                f"{RANK} {_among(table.rows)}",
                measured,
                what,
                _times(table.rows),
                _to_accuracy(table.rows),
            )
            if text
        ),
    )


def _among(rows: Sequence[Row]) -> str:
    totals = {row.published.shape: row.rank.among for row in rows}
    return f"So many there are: {', '.join(f'{total:,} on {shape}' for shape, total in totals.items())}."


def _config(row: Row) -> str:
    stages = len(row.paper.plan.stages)
    straight = row.published.config == "straight" and stages != row.published.workers
    return f"straight {stages}" if straight else row.published.config


def _proof(outcome: Outcome) -> str:
    if outcome.verdict.proven and outcome.gap <= 1e-6:
        return "proven"
    return f"≤{outcome.gap:.1%}"


def _times(rows: Sequence[Row]) -> str:
    parts = [
        f"{row.published.name} " + ", ".join(f"{one.pace_s * 1e3:.1f}" for one in (row.parallel, row.paper, row.ours))
        for row in rows
    ]
    return f"ms a minibatch (data parallelism, the paper's, ours): {'; '.join(parts)}."


def _to_accuracy(rows: Sequence[Row]) -> str:
    parts = [f"{row.published.name} {row.published.to_accuracy:g}" for row in rows if row.published.to_accuracy]
    return f"Time to accuracy, from the paper and not predicted: {', '.join(parts)}." if parts else ""


def _links(table: Table) -> Section:
    sources = list(dict.fromkeys(one.source for one in table.efficiencies))
    cells = [
        (
            *(one.cluster, one.level, one.operation),
            *(f"{one.nominal / 1e9:.4g}", f"{one.rate / 1e9:.3f}", f"{one.share:.3f}"),
            *(one.how, f"[{sources.index(one.source) + 1}]"),
        )
        for one in table.efficiencies
    ]
    return Section(
        "Links: nominal rate and what is reached of it, GB/s each way",
        ("on", "level", "operation", "nominal>", "reached>", "share>", "how", "from"),
        tuple(cells),
        after=(
            *(f"[{number}] {source}." for number, source in enumerate(sources, start=1)),
            "Cluster C computes at the ratio of its cards' peak to a V100's, as all profiles are a V100's.",
        ),
    )


def _experiments(table: Table) -> Section:
    cells = [_experiment(table, trial) for trial in table.trials]
    titles = tuple(f"{variant.title}>" for variant in VARIANTS)
    return Section(
        "Experiments: the same gains with one thing otherwise, links fitted anew",
        ("row", "publ.>", "pred.>", *titles, "a-r>", "msgs>"),
        tuple(cells),
        after=(
            *(f"{variant.title}: {variant.text}." for variant in VARIANTS),
            NEEDS,
        ),
    )


def _experiment(table: Table, trial: Trial) -> tuple[str, ...]:
    row = next(row for row in table.rows if row.published.name == trial.name)
    gains = tuple(f"{trial.gains[variant.key]:.2f}" for variant in VARIANTS)
    rates = (trial.needs.allreduce, trial.needs.messages)
    needs = tuple("–" if rate is None else f"{rate / 1e9:.2f}" for rate in rates)
    return (trial.name, f"{row.published.speedup:.2f}", f"{row.paper.gain:.2f}", *gains, *needs)


def _reasons(table: Table) -> Section:
    lines = []
    for reason in table.reasons:
        row = row_of(reason.name)
        assert row is not None, "reasons are of rows"
        lines.append(f"{reason.name}{'' if reason.explained else ' (open)'}: {reason.text}")
    return Section("Reasons of the rows that are off", before=tuple(lines))


def _inference(table: Table) -> Section:
    cells = []
    for one in table.inference:
        published = "" if one.published is None else f"{one.published:.2f}"
        off = "" if one.error is None else f"{one.error:+.0%}"
        cells.append((one.name, one.config, published, f"{one.speedup:.2f}", off, f"{one.seconds:.2f}"))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in inference.shares().items())
    slowest = max(inference.shares().values())
    copies = inference.CPUS // len(inference.LAYERS)
    bounded = (
        f"Pipelined with one layer a process, {copies} times over, the slowest layer bounds it: {copies} /"
        f" {slowest:.3f} = {copies / slowest:.2f}, though {inference.CPUS} CPUs are busy."
    )
    return Section(
        f"Inference of {inference.IMAGES:,} images on {inference.CPUS} CPUs: times faster than one",
        ("how", "replicas", "publ.>", "pred.>", "off>", "seconds>"),
        tuple(cells),
        before=(inference.SOURCE[0].upper() + inference.SOURCE[1:] + ".",),
        after=(
            f"Shares of the sequential time are not published; multiplications counted: {shares}.",
            bounded,
            _not_in_it(),
        ),
    )


def _not_in_it() -> str:
    more_s, reduce_s = (
        inference.PARALLEL[1] - inference.PARALLEL[0] / inference.CPUS,
        inference.reduce_s(inference.CPUS),
    )
    return (
        f"Data parallelism waits for nothing but the reduction of one number, {reduce_s * 1e6:.0f} µs in"
        f" ⌈log2 {inference.CPUS}⌉ steps. It took {more_s:.2f} s more than a twentieth of the sequential run: what"
        " every process does once, such as reading images and weights, is not in the model."
    )


def _short(config: str) -> str:
    """Long straight pipelines by their number of stages."""
    counts = config.split("-")
    return f"straight {len(counts)}" if len(counts) > 4 and set(counts) == {"1"} else config


def _replays(table: Table) -> Section:
    cells = []
    for one in table.replays:
        measured, off = ("–", "–") if one.measured_s is None else (f"{one.measured_s * 1e3:.2f}", f"{one.error:+.1%}")
        predicted = f"{one.predicted_s * 1e3:.2f}"
        cells.append((one.row, one.plan, _short(one.config), predicted, measured, off, f"{one.spread:.1%}"))
    found, failed = errors(table.replays), [one for one in table.replays if one.failure]
    summary = () if found is None else (f"Off by {found['median']:.1%} in the median, {found['worst']:.1%} at worst.",)
    return Section(
        "Replayed on emulated servers: ms a minibatch",
        ("row", "plan", "replicas", "predicted>", "replayed>", "off>", "spread>"),
        tuple(cells),
        after=(*summary, *(f"{one.row}, {one.plan}, was not replayed: {one.failure}" for one in failed)),
    )
