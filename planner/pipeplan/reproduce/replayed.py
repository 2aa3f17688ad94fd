"""The plans of the table replayed on emulated servers, a plan folder each; what was replayed before is read again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from pipeplan.errors import InputError
from pipeplan.evaluate import evaluate
from pipeplan.files import read_document, write_json
from pipeplan.profile_data import Profile
from pipeplan.rendering import documents, plan_folder
from pipeplan.reproduce.published import row_of
from pipeplan.reproduce.rows import PLANS, Predicted, Row
from pipeplan.solving import NO_CERTIFICATE, Outcome

FORMAT, VERSION = "pipeplan-table1-replay", 1
PLAN, RESULT = "plan.json", "replayed.json"


class Measured(Protocol):
    """What a replay tells."""

    @property
    def measured_s(self) -> float:
        """Seconds a minibatch, in the plan's own time."""

    @property
    def predicted_s(self) -> float:
        """The same by the planner."""

    @property
    def spread(self) -> float:
        """Standard error of the measured pace, as a share of it."""


Replayer = Callable[[Path, Profile], Measured]


@dataclass(frozen=True)
class Replay:
    """One plan of one row, replayed."""

    row: str
    plan: str
    """Which of the row's: ours, the paper's, data parallel, straight."""
    config: str
    predicted_s: float
    measured_s: float | None
    """None where the replay failed."""
    spread: float
    failure: str = ""
    """Why it failed."""

    @property
    def error(self) -> float | None:
        """How much slower than predicted it ran, as a share of the predicted time; None where it failed."""
        return None if self.measured_s is None else self.measured_s / self.predicted_s - 1


def replay(rows: Sequence[Row], folder: Path, run: Replayer, step: Callable[[str], None]) -> list[Replay]:
    """Replay the plans of all rows. A plan that two names stand for runs once; one whose result lies in `folder`, from
    the same plan and prediction, not at all. One that fails stands there with the reason."""
    found = []
    for row in rows:
        done: dict[tuple[object, ...], Replay] = {}
        for name, predicted in row.plans.items():
            key = predicted.plan.stages, predicted.plan.copies
            if key not in done:
                step(f"{row.published.name}: {name}, {predicted.config}")
                place = folder / row.published.name / _folder_of(name)
                try:
                    done[key] = _one(row, name, predicted, place, run)
                except InputError as error:
                    # The others are worth their minutes.
                    done[key] = Replay(
                        row.published.name, name, predicted.config, predicted.pace_s, None, 0.0, str(error)
                    )
            found.append(replace(done[key], plan=name))
    return found


def _one(row: Row, name: str, predicted: Predicted, folder: Path, run: Replayer) -> Replay:
    outcome = outcome_of(row, predicted)
    before = _kept(folder, documents.plan_document(outcome))
    if before is not None:
        return before
    _clear(folder)
    plan_folder.write_plan(outcome, folder)
    row.source.profile.save(folder / "profile.json")
    measured = run(folder, row.source.profile)
    done = Replay(
        row.published.name, name, predicted.config, measured.predicted_s, measured.measured_s, measured.spread
    )
    document = {name: value for name, value in asdict(done).items() if name != "failure"}
    write_json(folder / RESULT, {"format": FORMAT, "version": VERSION} | document)
    return done


def _kept(folder: Path, wanted: Mapping[str, Any]) -> Replay | None:
    """What was replayed before in a folder; None unless it was this plan, with the same time predicted for it.

    How long it was replayed does not count.
    """
    try:
        before = read_document(folder / PLAN, documents.PLAN_FORMAT, documents.VERSION)
        same = before["prediction"]["minibatch_s"].number() == wanted["prediction"]["minibatch_s"] and all(
            before[part].value == json.loads(json.dumps(wanted[part])) for part in ("plan", "profile", "cluster")
        )
        return _read(folder / RESULT) if same else None
    except InputError:
        # Missing or damaged: the replay writes both anew.
        return None


def _read(path: Path) -> Replay:
    root = read_document(path, FORMAT, VERSION)
    row, plan, config = (root[name].text() for name in ("row", "plan", "config"))
    predicted_s, measured_s, spread = (root[name].number() for name in ("predicted_s", "measured_s", "spread"))
    if predicted_s == 0:
        root["predicted_s"].fail("expected a time above 0")
    return Replay(row, plan, config, predicted_s, measured_s, spread)


def outcome_of(row: Row, predicted: Predicted) -> Outcome:
    """The row's outcome with another plan in it, to be written to a plan folder."""
    outcome = row.outcome
    if predicted is row.ours:
        return outcome
    score = evaluate(predicted.plan, outcome.problem)
    return replace(outcome, plan=predicted.plan, evaluation=score, bound_s=0.0, certificate=NO_CERTIFICATE)


def refuse_foreign(folder: Path) -> None:
    """Raise an `InputError` where a folder to keep replays in holds anything but rows with their replayed plans."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give another with --keep")
    plans = {_folder_of(name) for name in PLANS}
    for row in _members(folder):
        if row_of(row.name) is None or not _is_folder(row):
            _refuse(row, folder)
        for plan in _members(row):
            if plan.name not in plans or not _is_replay(plan):
                _refuse(plan, folder)


def _refuse(one: Path, folder: Path) -> NoReturn:
    raise InputError(
        f"{folder} holds {one.relative_to(folder)}, which no replay put there: give another folder with --keep"
    )


def _clear(folder: Path) -> None:
    """Empty the folder of a replay; the files that tell that it is one go last, whatever interrupts this."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not _is_replay(folder):
        raise InputError(f"{folder} holds something that no replay put there: move it away")
    try:
        for one in sorted(_members(folder), key=lambda one: one.name in (PLAN, RESULT)):
            if _is_folder(one):
                shutil.rmtree(one)
            else:
                one.unlink()
    except OSError as error:
        raise InputError(f"cannot replace what is in {folder}: {error.strerror or error}") from error


def _folder_of(plan: str) -> str:
    return plan.replace(" ", "-")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_replay(folder: Path) -> bool:
    """Whether that is a plan's folder, with a plan in it or a result, or nothing yet."""
    names = {one.name for one in _members(folder)} if _is_folder(folder) else {""}
    return not names or bool(names & {PLAN, RESULT})


def _members(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror or error}") from error
