"""The JSON Schemas of the files that pipeplan reads and of `check --json`: docs/reference/schemas.

`python tests/docs/schemas.py` writes them anew; `test_reference.py` holds them to the types that the readers use.
"""

from __future__ import annotations

import json
from typing import Any

from reference import REFERENCE

from pipeplan.checker.verify import CheckDocument
from pipeplan.cluster_data.cluster_document import ListedFile, UniformFile
from pipeplan.cluster_data.devices import DeviceFile
from pipeplan.cluster_data.machine_costs import ExecutorCostsFile
from pipeplan.problem.plan_file import PlanFile
from pipeplan.profile_data.profile_document import ProfileFields
from pipeplan.util.typed import json_schema
from pipeplan_launch.checkpoint.manifest import ManifestFile
from pipeplan_launch.plan.stage_files import StageFile
from pipeplan_launch.telemetry.run_folder import SummaryFile, TimelineFile

SCHEMAS = REFERENCE / "schemas"


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema, by the name of its file."""
    return {
        "profile.schema.json": json_schema(ProfileFields),
        "cluster.schema.json": json_schema(UniformFile, ListedFile),
        "plan.schema.json": json_schema(PlanFile),
        "check.schema.json": json_schema(CheckDocument),
        "device.schema.json": json_schema(DeviceFile),
        "executor-costs.schema.json": json_schema(ExecutorCostsFile),
        "stage.schema.json": json_schema(StageFile),
        "manifest.schema.json": json_schema(ManifestFile),
        "summary.schema.json": json_schema(SummaryFile),
        "timeline.schema.json": json_schema(TimelineFile),
    }


def text_of(schema: dict[str, Any]) -> str:
    """A schema as its file holds it."""
    return json.dumps(schema, indent=1) + "\n"


def main() -> None:
    """Write all schemas."""
    SCHEMAS.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (SCHEMAS / name).write_text(text_of(schema), encoding="utf-8")
        print(f"written: {SCHEMAS / name}")


if __name__ == "__main__":
    main()
