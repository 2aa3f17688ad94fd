"""The JSON Schemas of the files that people write or edit: docs/reference/schemas.

`python tests/docs/reference.py` writes them anew; `test_schemas.py` holds them to the types that the readers use.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from msgspec import Struct
from reference import REFERENCE

from pipeplan.cluster_data.cluster_document import ListedFile, UniformFile
from pipeplan.cluster_data.cluster_json import ClusterFields
from pipeplan.plan.plan import PlanFields
from pipeplan.problem.problem import Options
from pipeplan.profile_data.profile_document import ProfileFields
from pipeplan.util.typed import json_schema

SCHEMAS = REFERENCE / "schemas"


class PlanFile(Struct):
    """The parts of a plan.json from which its problem and its plan are made."""

    format: Literal["pipeplan-plan"]
    version: Literal[1]
    cluster: ClusterFields
    options: Options
    plan: PlanFields


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema, by the name of its file."""
    return {
        "profile.schema.json": json_schema(ProfileFields),
        "cluster.schema.json": json_schema(UniformFile, ListedFile),
        "plan.schema.json": json_schema(PlanFile),
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
