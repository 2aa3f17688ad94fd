"""JSON files that hold a checksum of themselves, so that every changed bit of them is noticed. Torch-free.

The checksum is the SHA-256 of the whole file, in which the checksum's own digits are zeros. It finds damage. It does
not keep anybody from writing another file, since it needs no secret.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

FIELD = "checksum"
_DIGITS = 64
_UNSET = "sha256:" + "0" * _DIGITS
_ENTRY = re.compile(rb'"checksum": "sha256:([0-9a-f]{64})"')


def with_checksum(content: Mapping[str, Any], *, indent: int) -> str:
    """The content as indented JSON with a field `checksum` behind the field `version`.

    An older checksum in the content is replaced. NaN and infinity raise a `ValueError`.
    """
    fields: dict[str, Any] = {}
    for name, value in content.items():
        if name != FIELD:
            fields[name] = value
        if name == "version":
            fields[FIELD] = _UNSET
    text = json.dumps(fields, indent=indent, allow_nan=False) + "\n"
    return text.replace(_UNSET, f"sha256:{_digest(text.encode())}", 1)


def is_unchanged(raw: bytes) -> bool:
    """Whether the bytes of a file are those that `with_checksum` made."""
    entry = _ENTRY.search(raw)
    if entry is None:
        return False
    start, end = entry.span(1)
    return _digest(raw[:start] + b"0" * _DIGITS + raw[end:]) == entry[1].decode()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
