"""The whole table: links, rows, experiments, reasons, and inference on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.reproduce import inference, profiles
from pipeplan.reproduce.efficiencies import Efficiency, fit
from pipeplan.reproduce.experiments import Trial, Variant, gain_with, try_all
from pipeplan.reproduce.inference import Inference
from pipeplan.reproduce.profiles import Source
from pipeplan.reproduce.published import FITTED, ROWS, Published, row_of
from pipeplan.reproduce.reasons import Findings, Reason, reasons
from pipeplan.reproduce.replayed import Replay
from pipeplan.reproduce.rows import Row, predict
from pipeplan.solving import Settings
from pipeplan.suggest import did_you_mean

Step = Callable[[str], None]


@dataclass(frozen=True)
class Table:
    """What the command prints."""

    efficiencies: tuple[Efficiency, ...]
    rows: tuple[Row, ...]
    trials: tuple[Trial, ...]
    reasons: tuple[Reason, ...]
    inference: tuple[Inference, ...]
    replays: tuple[Replay, ...] = field(default=())

    def trial(self, name: str) -> Trial | None:
        """The experiments on a row."""
        return next((trial for trial in self.trials if trial.name == name), None)


def chosen(names: str | None) -> tuple[Published, ...]:
    """The rows of a list with commas, in the paper's order; all of them where there is none."""
    if names is None:
        return ROWS
    known = [row.name for row in ROWS]
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if row_of(name) is None:
            raise InputError(f"--rows: there is no row {name!r}; {did_you_mean(name, known)}")
    return tuple(row for row in ROWS if row.name in wanted)


def build(wanted: Sequence[Published], folder: Path | None, settings: Settings, step: Step) -> Table:
    """Everything but the replays. The links are fitted on the VGG-16 rows whether those are wanted or not."""
    fitted = {cluster: row for cluster, name in FITTED.items() if (row := row_of(name)) is not None}
    sources: dict[str, Source] = {row.name: profiles.load(row, folder) for row in (*fitted.values(), *wanted)}
    measured = {name: source.profile for name, source in sources.items()}
    step("the links")
    known = fit(fitted, gain_with(measured, Variant("", "", "")))
    rows = [predict(row, sources[row.name], known, settings, step) for row in wanted]
    trials = try_all(wanted, fitted, measured, known, step)
    step("inference on CPUs")
    why = reasons(rows, Findings(known, {trial.name: trial for trial in trials}, measured))
    return Table(known, tuple(rows), tuple(trials), tuple(why), tuple(inference.predict()))
