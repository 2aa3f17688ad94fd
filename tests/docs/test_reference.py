"""The reference is what the code says: pages, and schemas that are those of the readers' types and describe files.

`python tests/docs/reference.py` and `python tests/docs/schemas.py` write them anew.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manifests import write_manifest
from reference import REFERENCE, api, command_line
from repository import ROOT
from schemas import SCHEMAS, schemas, text_of

from pipeplan_launch.checkpoint.manifest import Position

BUNDLED, WRITTEN = ROOT / "profiles", ROOT / "tests" / "goldens" / "data" / "files"


@pytest.mark.parametrize(("page", "written"), [("cli.md", command_line), ("api.md", api)])
def test_the_page_is_as_written_now(page: str, written: Callable[[], str]) -> None:
    assert (REFERENCE / page).read_text(encoding="utf-8").strip() == written().strip()


def test_the_published_schemas_are_those_of_the_types() -> None:
    for name, schema in schemas().items():
        assert (SCHEMAS / name).read_text(encoding="utf-8") == text_of(schema), name


def test_bundled_and_written_files_follow_their_schemas(tmp_path: Path) -> None:
    write_manifest(tmp_path, Position(2, 1, 9))
    files = [("profile", path) for path in BUNDLED.glob("*.json")]
    files += [("cluster", path) for path in BUNDLED.glob("clusters/*.toml")]
    files += [("device", path) for path in BUNDLED.glob("devices/*.toml")]
    files += [("plan", path) for path in WRITTEN.glob("*/plan/plan.json.txt")]
    files += [("stage", path) for path in WRITTEN.glob("*/plan/stages/*.json.txt")]
    files += [("manifest", tmp_path / "manifest.json")]
    assert len({name for name, _ in files}) == 6
    for name, path in files:
        read = tomllib.loads if path.suffix == ".toml" else json.loads
        schema = schemas()[f"{name}.schema.json"]
        assert complaints(read(path.read_text()), schema, schema) == [], path


def test_a_wrong_profile_does_not_follow_the_schema() -> None:
    schema, right = schemas()["profile.schema.json"], json.loads((BUNDLED / "mnist-v100.json").read_text())
    for change, complaint in (
        ({"minibatch": 0}, "minibatch: below 1"),
        ({"minibatch": "8"}, "minibatch: not integer"),
        ({"layers": {}}, "layers: not array"),
        ({"version": 2}, "version: not one of [1]"),
    ):
        assert complaints(right | change, schema, schema) == [complaint]


TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def complaints(value: Any, schema: dict[str, Any], root: dict[str, Any], place: str = "") -> list[str]:
    """Where a value does not follow a schema, by the keywords of JSON Schema that ours use."""
    if reference := schema.get("$ref"):
        return complaints(value, root["$defs"][reference.rpartition("/")[2]], root, place)
    if choices := schema.get("anyOf"):
        tried = [complaints(value, choice, root, place) for choice in choices]
        return min(tried, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place}: not one of {schema['enum']}"]
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{place}: not {kind}"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        return [f"{place}: below {low}"] if value < low else [f"{place}: above {high}"] if value > high else []
    found: list[str] = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [f"{place}: no {name}" for name in schema.get("required", []) if name not in value]
        for name, member in value.items():
            if name in known:
                found += complaints(member, known[name], root, f"{place}.{name}".removeprefix("."))
            elif schema.get("additionalProperties") is False:
                found.append(f"{place}: unknown {name}")
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        found.append(f"{place}: too short")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, member in enumerate(value):
            found += complaints(member, schema["items"], root, f"{place}[{index}]")
    return found
