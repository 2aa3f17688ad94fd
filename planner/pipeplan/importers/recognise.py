"""Which tool wrote a file, by what is in it."""

from __future__ import annotations

from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.files import read_json, read_text
from pipeplan.profile_data import FORMAT

PIPEDREAM, DNN_PARTITIONING, PIPER, NCCL_TESTS = "pipedream", "dnn-partitioning", "piper", "nccl-tests"
FORMATS = (PIPEDREAM, DNN_PARTITIONING, PIPER, NCCL_TESTS)


def recognise(path: Path) -> str:
    """The format of a file; an `InputError` where it is none of those that can be read."""
    text = read_text(path)
    if not text.lstrip().startswith(("{", "[")):
        if "compute_time=" in text or text.startswith("\t"):
            return PIPEDREAM
        raise InputError(
            f"{path} is none of the formats that can be read ({', '.join(FORMATS)}): if it is, say --format"
        )
    fields = read_json(path, "file of layers or links").value
    if isinstance(fields, dict):
        if fields.get("format") == FORMAT:
            raise InputError(f"{path} is a profile of pipeplan already: there is nothing to import")
        if "maxFPGAs" in fields or _in_nodes(fields, "fpgaLatency"):
            return DNN_PARTITIONING
        if "mbsInBatch" in fields or _in_nodes(fields, "TMPCs"):
            return PIPER
        if "results" in fields and ("config" in fields or "nccl_version" in fields):
            return NCCL_TESTS
    raise InputError(
        f"{path} is JSON, but none of the formats that can be read ({', '.join(FORMATS[1:])}): if it is, say --format"
    )


def _in_nodes(fields: dict[str, object], key: str) -> bool:
    nodes = fields.get("nodes")
    return isinstance(nodes, list) and any(isinstance(node, dict) and key in node for node in nodes)
