"""Edits one level in the text of a cluster file and leaves the rest as it is, comments included."""

from __future__ import annotations

import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Level
from pipeplan.errors import InputError
from pipeplan.util.files import read_text, write_text
from pipeplan.util.text import did_you_mean

Value = str | float
_TABLE = re.compile(r"\s*\[\[?[^\]\n]+\]\]?\s*(#.*)?")
_LEVEL = re.compile(r"\s*\[\[\s*level\s*\]\]\s*(#.*)?")


def toml_lines(fields: Mapping[str, Value]) -> list[str]:
    """Lines of TOML, one for each field."""
    return [f"{key} = {cluster_toml.toml_text(value)}" for key, value in fields.items()]


def level_to_edit(path: Path, name: str | None, *, joins_servers: bool) -> Level:
    """The level `name` of the cluster file at `path`.

    Where `name` is None, the outermost level if the new links join servers (`joins_servers`), otherwise the innermost.
    Raises an `InputError` where there is no such level, or none that can be edited.
    """
    cluster = cluster_toml.read_cluster(path)
    names = _names(read_text(path))
    if not names:
        raise InputError(f"{path} has no [[level]] tables to put links into")
    if name is None and not joins_servers and not cluster.uniform:
        raise InputError(f"{path} has a [[server]] table for the links inside each server: write them there")
    if name is None:
        name = names[-1] if joins_servers else names[0]
    if name not in names:
        raise InputError(f"{path} has no level {name!r}; {did_you_mean(name, names)}")
    # The innermost level of a heterogeneous cluster is a summary of its servers and has no [[level]] table.
    return cluster.levels[len(cluster.levels) - len(names) :][names.index(name)]


def _names(text: str) -> list[str]:
    return [str(level.get("name")) for level in tomllib.loads(text).get("level", [])]


def with_edited_level(path: Path, name: str, fields: Mapping[str, Value]) -> str:
    """The text of the cluster file at `path` after setting `fields` in its level `name`.

    Raises an `InputError` where the file defines its levels in another way than by `[[level]]` tables.
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
    """The lines of a table after setting `fields`: in place where they exist, otherwise after its last field."""
    rest = dict(fields)
    edited = []
    for line in lines:
        key = line.partition("=")[0].strip().strip("\"'")
        edited += toml_lines({key: rest.pop(key)}) if "=" in line and key in rest else [line]
    last = max((n for n, line in enumerate(edited) if line.strip() and not line.lstrip().startswith("#")), default=-1)
    return [*edited[: last + 1], *toml_lines(rest), *edited[last + 1 :]]


def write_cluster_text(path: Path, text: str) -> Cluster:
    """Write `text` to a cluster file and return the cluster. Raises an `InputError`, and writes nothing, where the text
    is not a valid cluster file."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / path.name
        trial.write_text(text, encoding="utf-8")
        try:
            cluster = cluster_toml.read_cluster(trial)
        except InputError as error:
            raise InputError(str(error).replace(str(trial), f"{path} after the edit")) from None
    write_text(path, text)
    return cluster
