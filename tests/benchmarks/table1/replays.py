"""Replays of the table's plans on emulated servers, each in a folder of its own, so that they can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.planning.figure import Figure
from pipeplan.planning.outcome import NO_CERTIFICATE, Outcome
from pipeplan.problem import plan_file
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder, plan_json
from pipeplan.util.files import read_document, write_json
from table1.rows import Predicted, Row

FORMAT, VERSION = "pipeplan-table1-replay", 1
PLAN_FILE, RESULT_FILE = "plan.json", "replayed.json"


class ReplayResult(Protocol):
    """The part of a replay's result that the table shows."""

    @property
    def measured_s(self) -> float:
        """Measured seconds per minibatch, in the plan's own time."""

    @property
    def predicted_s(self) -> float:
        """Predicted seconds per minibatch, as plan.json states them."""

    @property
    def simulated_s(self) -> float | None:
        """Simulated seconds per minibatch; None where there is no steady state."""

    @property
    def spread(self) -> float:
        """Standard error of the measured pace, as a share of it."""


Replayer = Callable[[Path, Profile], ReplayResult]


@dataclass(frozen=True)
class Replay:
    """One replayed plan of one row. Times are seconds per minibatch."""

    row: str
    plan: str
    """A name from `rows.PLANS`."""
    config: str
    predicted_s: float
    measured_s: float | None
    """None where the replay failed."""
    spread: float
    failure: str = ""
    """The reason why the replay failed."""
    simulated_s: float | None = None

    @property
    def step_s(self) -> float:
        """The step time that an answer has for the plan: simulated, and at least that of the formulas."""
        return self.predicted_s if self.simulated_s is None else max(self.predicted_s, self.simulated_s)

    @property
    def error(self) -> float | None:
        """Measured over predicted step time, less 1; None where the replay failed."""
        return None if self.measured_s is None else self.measured_s / self.step_s - 1


def replay_rows(rows: Sequence[Row], folder: Path, run: Replayer, report: Callable[[str], None]) -> list[Replay]:
    """Replay the plans of all rows, each in the folder `folder/ROW/PLAN`.

    A plan with two names runs once. A plan that was already replayed in its folder does not run again. A replay that
    fails is listed with the reason, and the others still run.
    """
    replays = []
    for row in rows:
        name = row.published.name
        done: dict[tuple[object, ...], Replay] = {}
        for plan_name, predicted in row.plans.items():
            key = predicted.plan.stages, predicted.plan.copies
            if key not in done:
                report(f"{name}: {plan_name}, {predicted.config}")
                try:
                    done[key] = _replay(row, plan_name, predicted, folder / name / plan_name.replace(" ", "-"), run)
                except InputError as error:
                    done[key] = Replay(name, plan_name, predicted.config, predicted.pace_s, None, 0.0, str(error))
            replays.append(replace(done[key], plan=plan_name))
    return replays


def _replay(row: Row, plan_name: str, predicted: Predicted, folder: Path, run: Replayer) -> Replay:
    outcome = _outcome_with(row, predicted)
    if folder.exists() and any(folder.iterdir()):
        if not _holds(folder, plan_json.plan_document(outcome, folder)):
            raise InputError(f"{folder} holds something other than this plan: move it away, or give another --keep")
        if (folder / RESULT_FILE).is_file():
            return _read_result(folder / RESULT_FILE)
        shutil.rmtree(folder)  # an interrupted replay of this very plan
    plan_folder.write_plan(outcome, folder)
    row.source.profile.save(folder / "profile.json")
    result = run(folder, row.source.profile)
    times = predicted.pace_s, result.measured_s, result.spread
    replay = Replay(row.published.name, plan_name, predicted.config, *times, simulated_s=result.simulated_s)
    fields = {name: value for name, value in asdict(replay).items() if name != "failure"}
    write_json(folder / RESULT_FILE, {"format": FORMAT, "version": VERSION} | fields)
    return replay


def _holds(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether a folder holds the wanted plan, with the same predicted time."""
    try:
        stored = plan_file.read_plan_document(folder)
        same_time = stored["prediction"]["minibatch_s"].number() == wanted["prediction"]["minibatch_s"]
        return same_time and all(
            stored[part].value == json.loads(json.dumps(wanted[part])) for part in ("plan", "profile", "cluster")
        )
    except InputError:
        return False


def _read_result(path: Path) -> Replay:
    root = read_document(path, FORMAT, VERSION)
    row, plan, config = (root[name].text() for name in ("row", "plan", "config"))
    predicted_s, measured_s, spread = (root[name].number() for name in ("predicted_s", "measured_s", "spread"))
    if predicted_s == 0:
        root["predicted_s"].fail("expected a time above 0")
    simulated = root.get("simulated_s")
    simulated_s = None if simulated is None else simulated.number()
    return Replay(row, plan, config, predicted_s, measured_s, spread, simulated_s=simulated_s)


def _outcome_with(row: Row, predicted: Predicted) -> Outcome:
    """The row's outcome with another plan in it, to be written to a plan folder."""
    outcome = row.outcome
    if predicted is row.ours:
        return outcome
    score = evaluate(predicted.plan, outcome.problem)
    # The row's bound is for plans that fit in memory. Whatever this plan is, it is no faster than its own time.
    changed = replace(outcome, plan=predicted.plan, evaluation=score, certificate=NO_CERTIFICATE, choice=None)
    return replace(changed, figure=Figure(score.pace_s), bound_s=min(outcome.bound_s, score.pace_s))


def error_summary(replays: Sequence[Replay]) -> tuple[float, float] | None:
    """The median and the largest absolute error of the replays that ran; None where none did."""
    sizes = [abs(one.error) for one in replays if one.error is not None]
    return (median(sizes), max(sizes)) if sizes else None
