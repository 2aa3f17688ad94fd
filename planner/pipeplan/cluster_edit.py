"""Changes a level in the text of a cluster file, and leaves all else in it as it was, comments too."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pipeplan import cluster_file
from pipeplan.cluster_data import Cluster, Level
from pipeplan.errors import InputError
from pipeplan.files import read_text, write_text
from pipeplan.suggest import did_you_mean

Value = str | float
_TABLE = re.compile(r"\s*\[\[?[^\]\n]+\]\]?\s*(#.*)?")
_LEVEL = re.compile(r"\s*\[\[\s*level\s*\]\]\s*(#.*)?")


def toml(fields: Mapping[str, Value]) -> list[str]:
    """Lines of TOML, a field each."""
    # A JSON string is a TOML basic string: both escape the quote, the backslash and control characters alike.
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]


def level_of(path: Path, name: str | None, *, joins_servers: bool) -> Level:
    """The level `name` of a cluster file; where that is None the outermost, or the innermost where it is in a server.

    Raises `InputError` where there is no such level, or none that can be edited.
    """
    cluster = cluster_file.parse(path)
    names = _names(read_text(path))
    if not names:
        raise InputError(f"{path} has no [[level]] tables to put links into")
    if name is None and not joins_servers and not cluster.uniform:
        raise InputError(f"{path} has a [[server]] table for the links inside each server: write them there")
    if name is None:
        name = names[-1] if joins_servers else names[0]
    if name not in names:
        raise InputError(f"{path} has no level {name!r}; {did_you_mean(name, names)}")
    # Where servers differ, the innermost of the cluster's levels sums them up and stands in no table.
    return cluster.levels[len(cluster.levels) - len(names) :][names.index(name)]


def _names(text: str) -> list[str]:
    return [str(level.get("name")) for level in tomllib.loads(text).get("level", [])]


def with_level(path: Path, name: str, fields: Mapping[str, Value]) -> str:
    """The text of the cluster file at `path` with `fields` in its level `name`.

    Raises `InputError` where the file says its levels in another way than as `[[level]]` tables.
    """
    text = read_text(path)
    names, lines = _names(text), text.splitlines()
    starts = [number for number, line in enumerate(lines) if _LEVEL.fullmatch(line)]
    if len(starts) != len(names):
        raise InputError(f"{path}: its levels are not [[level]] tables; write them so, and import again")
    start = starts[names.index(name)] + 1
    end = next((n for n in range(start, len(lines)) if _TABLE.fullmatch(lines[n])), len(lines))
    return "\n".join([*lines[:start], *_edited(lines[start:end], fields), *lines[end:]]) + "\n"


def _edited(lines: list[str], fields: Mapping[str, Value]) -> list[str]:
    """The lines of a table with fields replaced where they stand, or added after the last of them."""
    rest = dict(fields)
    found = []
    for line in lines:
        key = line.partition("=")[0].strip().strip("\"'")
        found += toml({key: rest.pop(key)}) if "=" in line and key in rest else [line]
    last = max((n for n, line in enumerate(found) if line.strip() and not line.lstrip().startswith("#")), default=-1)
    return [*found[: last + 1], *toml(rest), *found[last + 1 :]]


def save(path: Path, text: str) -> Cluster:
    """Write a cluster file, once it has proven to be one."""
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / path.name
        tried.write_text(text, encoding="utf-8")
        try:
            cluster = cluster_file.parse(tried)
        except InputError as error:
            raise InputError(str(error).replace(str(tried), f"{path}, as it would be")) from None
    write_text(path, text)
    return cluster
