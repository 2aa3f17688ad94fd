"""The printed sections of the table: titles, cells and sentences, independent of the output format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.planning.outcome import Outcome
from table1 import inference
from table1.experiments import VARIANTS, Experiment
from table1.published import FITTED, SOURCE
from table1.replays import error_summary
from table1.rows import OFF, Row
from table1.table import Table

COLUMNS = (
    "publ., pred.: the published and the predicted speed-up; the second pred. is that of our plan. proof: ≤ says how"
    " much faster another plan can be at most, where shared cards cost something, which neither solver models."
)
RANK = (
    "rank: the rank of the paper's configuration among all lists of replica counts, each with its best cuts on"
    " consecutive workers, and copies inside each server; without shared cards, and without the passes that wait for an"
    " update, as those of data parallelism do in pred."
)
REQUIRED = (
    "a-r, msgs: the rate in GB/s at which all-reduces, or messages, would have to run on the row's main link to give"
    " the published speed-up, all else as predicted; – where no rate up to the nominal one does. nominal: the"
    " prediction with all-reduces at the nominal rate."
)


@dataclass(frozen=True)
class Section:
    """A title, sentences, a table, and sentences below it. Columns that end in `>` are aligned to the right."""

    title: str
    columns: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def sections_of(table: Table) -> list[Section]:
    """The sections of the whole table."""
    sections = [_rows(table), _links(table)]
    if table.experiments:
        sections.append(_experiments(table))
    sections.append(_inference(table))
    return [*sections, _replays(table)] if table.replays else sections


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
    estimates = f"Rows with estimated profiles: {', '.join(estimated)}." if estimated else ""
    measured = f"Profiles published by PipeDream's authors: {'; '.join(sorted(sizes))}." if sizes else ""
    return Section(
        "Table 1: times faster than data parallelism",
        ("row", "on", "paper's", "publ.>", "pred.>", "off>", "rank>", "ours", "pred.>", "proof"),
        tuple(cells),
        before=(SOURCE + ".",),
        after=tuple(
            text
            for text in (
                f"Starred rows are off by more than {OFF:.0%}; docs/table1.md gives the reasons.",
                "The rows of VGG-16 are fitted, not predicted." if _has_fitted(table.rows) else "",
                COLUMNS,
                f"{RANK} {_among(table.rows)}",
                measured,
                estimates,
                _times(table.rows),
                _to_accuracy(table.rows),
            )
            if text
        ),
    )


def _has_fitted(rows: Sequence[Row]) -> bool:
    return any(row.published.name in FITTED.values() for row in rows)


def _among(rows: Sequence[Row]) -> str:
    totals = {row.published.shape: row.rank.among for row in rows}
    return f"There are {', '.join(f'{total:,} on {shape}' for shape, total in totals.items())}."


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
        f"{row.published.name} "
        + ", ".join(f"{one.pace_s * 1e3:.1f}" for one in (row.data_parallel, row.paper, row.ours))
        for row in rows
    ]
    return f"Milliseconds per minibatch (data parallelism, the paper's plan, ours): {'; '.join(parts)}."


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
        "Links: nominal and reached rate, GB/s each way",
        ("on", "level", "operation", "nominal>", "reached>", "share>", "how", "from"),
        tuple(cells),
        after=(
            *(f"[{number}] {source}." for number, source in enumerate(sources, start=1)),
            "All profiles are of a V100; the speed of cluster C's cards is the ratio of their peak to a V100's.",
        ),
    )


def _experiments(table: Table) -> Section:
    cells = [_experiment(table, experiment) for experiment in table.experiments]
    titles = tuple(f"{variant.title}>" for variant in VARIANTS)
    return Section(
        "Experiments: the speed-ups with one changed assumption, links fitted anew",
        ("row", "publ.>", "pred.>", *titles, "a-r>", "msgs>", "nominal>"),
        tuple(cells),
        after=(
            *(f"{variant.title}: {variant.text}." for variant in VARIANTS),
            REQUIRED,
        ),
    )


def _experiment(table: Table, experiment: Experiment) -> tuple[str, ...]:
    row = next(row for row in table.rows if row.published.name == experiment.name)
    gains = tuple(f"{experiment.gains[variant.title]:.2f}" for variant in VARIANTS)
    required = experiment.required
    rates = tuple("–" if rate is None else f"{rate / 1e9:.2f}" for rate in (required.allreduce, required.messages))
    published, predicted = f"{row.published.speedup:.2f}", f"{row.paper.gain:.2f}"
    return (experiment.name, published, predicted, *gains, *rates, f"{required.gain_at_nominal:.2f}")


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
        f"With one layer per process, in {copies} copies, the slowest layer bounds the pipeline: {copies} /"
        f" {slowest:.3f} = {copies / slowest:.2f}, though {inference.CPUS} CPUs are busy."
    )
    return Section(
        f"Inference of {inference.IMAGES:,} images on {inference.CPUS} CPUs: times faster than one",
        ("how", "replicas", "publ.>", "pred.>", "off>", "seconds>"),
        tuple(cells),
        before=(inference.SOURCE[0].upper() + inference.SOURCE[1:] + ".",),
        after=(
            f"Shares of the sequential time, by the number of multiplications: {shares}.",
            bounded,
            _unmodelled(),
        ),
    )


def _unmodelled() -> str:
    extra_s = inference.PARALLEL[1] - inference.PARALLEL[0] / inference.CPUS
    reduce_s = inference.reduce_s(inference.CPUS)
    return (
        f"Data parallelism waits only for the reduction of one number, {reduce_s * 1e6:.0f} µs in"
        f" ⌈log2 {inference.CPUS}⌉ steps. It took {extra_s:.2f} s more than a twentieth of the sequential run:"
        " the model leaves out the work that every process does once, such as reading images and weights."
    )


def _short(config: str) -> str:
    """A configuration, with long straight pipelines abbreviated to their number of stages."""
    counts = config.split("-")
    return f"straight {len(counts)}" if len(counts) > 4 and set(counts) == {"1"} else config


def _replays(table: Table) -> Section:
    cells = []
    for one in table.replays:
        measured, off = ("–", "–") if one.measured_s is None else (f"{one.measured_s * 1e3:.2f}", f"{one.error:+.1%}")
        paces = f"{one.predicted_s * 1e3:.2f}", f"{one.step_s * 1e3:.2f}", measured
        cells.append((one.row, one.plan, _short(one.config), *paces, off, f"{one.spread:.1%}"))
    errors, failed = error_summary(table.replays), [one for one in table.replays if one.failure]
    summary = () if errors is None else (f"Off by {errors[0]:.1%} in the median, {errors[1]:.1%} at worst.",)
    return Section(
        "Replayed on emulated servers: ms per minibatch",
        ("row", "plan", "replicas", "formulas>", "step time>", "replayed>", "off>", "spread>"),
        tuple(cells),
        after=(*summary, *(f"{one.row}, {one.plan}, was not replayed: {one.failure}" for one in failed)),
    )
