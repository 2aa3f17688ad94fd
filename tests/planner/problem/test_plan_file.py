"""plan.json has one reader: its errors name the field, and everybody names the cause that it states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from checking import QUICK, Document, changed, fault, written
from reported import branching, small_cluster

from pipeplan.drawing.answer import answer_lines
from pipeplan.errors import InputError
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.plan_file import BatchTime, PlanFile
from pipeplan.problem.problem import Problem
from pipeplan.report.source import read_report_source
from pipeplan.util.files import Node


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Data parallelism under a flush, one microbatch a worker."""
    options = Options(schedule="1f1b-flush", accumulate=4, stages=1)
    return solve(Problem(branching(4), small_cluster(), options), QUICK)


def test_the_cause_of_data_parallelism_is_compute_or_the_exchange() -> None:
    batch = BatchTime(4, 1.0, 0.0, 0.5, 1.2, "compute of stage 1")
    assert batch.cause(1) == "compute of stage 1"
    assert replace(batch, exposed_s=2.0).cause(1) == "gradient synchronisation"
    assert replace(batch, exposed_s=0.8).cause(2) == "filling and draining the pipeline"


def test_screen_report_and_check_name_one_cause(outcome: Outcome) -> None:
    document, profile = written(outcome), outcome.problem.profile
    batch, cause = outcome.evaluation.batch, document["prediction"]["bound_by"]
    assert batch is not None
    assert batch.steady_s == 0, "the first microbatch is the only one"
    assert cause in ("compute of stage 1", "gradient synchronisation")
    assert read_report_source(Node(document, "plan.json"), profile).bound == cause
    assert any(line.startswith(f"WHY   bound by {cause}") for line in answer_lines(outcome, 100))
    assert fault(document, profile) == ""
    for other in ("filling and draining the pipeline", "waiting for other stages between passes"):
        forged = changed(document, lambda d: d["prediction"].update(bound_by=other))  # noqa: B023
        assert "bound_by" in fault(forged, profile)


def test_a_wrong_field_is_named(outcome: Outcome) -> None:
    changes: tuple[tuple[Callable[[Document], object], str], ...] = (
        (lambda d: d["plan"].update(schedule="forward-only"), "plan: schedule: there is no such schedule for training"),
        (lambda d: d["plan"]["stages"][0].update(depth=0), "plan: stages[0]: depth: expected at least 1"),
        (lambda d: d["prediction"]["stages"].clear(), "prediction: stages: expected 1, one for each stage, found 0"),
        (lambda d: d["prediction"]["stages"][0].pop("sync_s"), "prediction: stages[0]: the field 'sync_s' is missing"),
        (lambda d: d["stated"].update(minibatch_s=0.0), "stated: minibatch_s: expected more than 0"),
        (lambda d: d["profile"].update(minibatch=0), "profile: minibatch: expected at least 1"),
        (lambda d: d["cluster"].pop("levels"), "cluster: the field 'levels' is missing"),
        (lambda d: d["options"].update(overlap=2), "the overlap must lie between 0 and 1"),
    )
    for change, place in changes:
        with pytest.raises(InputError) as error:
            PlanFile.of(Node(changed(written(outcome), change), "plan.json"))
        assert str(error.value).startswith("plan.json: ")
        assert place in str(error.value)
