"""What a plan says of its updates: in the table, in its files, and by the executor in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import Run
from small_plans import shaped

import pipeplan
from pipeplan.plan.updates import Updates
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.rendering.plan_json import plan_document
from pipeplan_launch.plan.run_options import updates_sentence
from pipeplan_launch.plan.stage_files import load_plan

SETTINGS = Settings(solver="dp", certify=False, simulate=False)


def test_staleness_and_samples_of_every_schedule() -> None:
    for replicas, depths, schedule, accumulate, stale_by, samples, text in (
        (
            (1, 1, 1),
            (3, 2, 1),
            "1f1b-stashing",
            None,
            (2, 1, 0),
            (10, 10, 10),
            "are up to 2, 1, 0 updates old by stage",
        ),
        # A stage with replicas awaits its all-reduce one update later.
        ((3, 1), (2, 1), "1f1b-stashing", None, (2, 0), (30, 10), "an update averages over 30, 10 samples by stage."),
        ((4,), (1,), "1f1b-stashing", None, (0,), (40,), "Synchronous (1f1b-stashing): no gradient is stale; an upd"),
        ((1, 1, 1), (3, 2, 1), "vertical-sync", None, (2, 2, 2), (10, 10, 10), "are up to 2 updates old; an update"),
        ((2, 1), (2, 1), "2bw", 8, (1, 1), (80, 80), "are up to 1 update old; an update averages over 80 samples."),
        ((2, 1), (4, 8), "gpipe", 8, (0, 0), (80, 80), ""),
        ((1, 1), (2, 1), "1f1b-flush", 8, (0, 0), (80, 80), ""),
    ):
        found = Updates.of(shaped(replicas, depths, schedule, accumulate), 10)
        assert (found.stale_by, found.samples) == (stale_by, samples), (replicas, schedule)
        assert found.synchronous is (sum(stale_by) == 0)
        assert text in found.text
    many = Updates.of(shaped((1,) * 12, tuple(range(12, 0, -1)), "1f1b-stashing"), 10)
    assert "up to 11, 10, 9, …, 0 updates old by stage;" in many.text


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "vertical-sync"}, {"schedule": "2bw", "accumulate": 8}, {"max_workers": 1}]
)
def test_table_files_and_executor_say_the_same(options: dict[str, object], tmp_path: Path) -> None:
    profile, cluster = pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C")
    outcome: Outcome = pipeplan.solve(profile, cluster, settings=SETTINGS, **options)  # type: ignore[arg-type]
    folder = pipeplan.render(outcome, tmp_path / "plan")
    told = Updates.of(outcome.plan, profile.minibatch)
    assert updates_sentence(load_plan(folder)) == told.text
    assert f"# {told.text}\n" in (folder / "launch.sh").read_text(encoding="utf-8")
    written = plan_document(outcome)["updates"]
    assert {name: value for name, value in written.items() if name != "learning"} == told.to_json()
    assert ("learning" in written) is not told.synchronous


def test_the_answer_says_it_beside_the_plan_and_inference_has_no_updates(run: Run) -> None:
    words = ("solve", "mnist-v100", "--cluster", "C", "--solver", "dp", "--no-write", "--stages", "2")

    def plan_lines(*more: str) -> str:
        lines = run(*words, *more).out.splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("RUN "))
        return "\n".join(lines[start : start + 2])

    assert "gradients up to 3 updates old" in plan_lines("--schedule", "1f1b-stashing")
    assert "gradients up to 1 update old" in plan_lines("--schedule", "2bw", "--batch", "256")
    assert "trains like one process" in plan_lines("--schedule", "1f1b-flush", "--batch", "256")
    assert "inference: the forward pass only" in plan_lines("--inference")
    assert "updates of" not in run(*words, "--inference").out.lower()
