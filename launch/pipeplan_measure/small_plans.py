"""Plan folders of small runs on one machine. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeplan_launch.plan.stage_files import STAGE_FORMAT


def write_stage_files(
    folder: Path, job: str, pipeline: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]
) -> None:
    """Write the stage files of a plan that trains `job` on one server. `stages`: the fields of each single file."""
    shared = {"format": STAGE_FORMAT, "version": 1, "plan": "sha256:small", "mode": "training", "pipeline": pipeline}
    shared |= {"model": {"ref": job, "graph_hash": None}, "servers": 1}
    shared["workers_per_server"] = len({worker for stage in pipeline for worker in stage["workers"]})
    (folder / "stages").mkdir(parents=True)
    for number, own in enumerate(stages):
        content = json.dumps({**shared, **own, "stage": number})
        (folder / "stages" / f"stage-{number}.json").write_text(content, encoding="utf-8")
