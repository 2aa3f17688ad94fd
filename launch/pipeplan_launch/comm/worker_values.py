"""Encoding of the values, other than tensors, that workers send each other. Torch-free.

A pickle may run any code when it is read. MessagePack cannot, and msgspec refuses values that do not have the expected
type. Dataclasses, lists, tuples, dictionaries, paths and numbers of 64 bits can be sent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from pipeplan_launch.errors import LaunchError


def encode(value: Any) -> bytes:
    """The value as MessagePack. NaN and infinity are kept. Raises `TypeError` for a type that cannot be sent."""
    return msgspec.msgpack.encode(value, enc_hook=_path_as_bytes)


def decode(data: bytes, kind: Any) -> Any:
    """The value of type `kind` that `encode` wrote. Raises `LaunchError` for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_path_from_bytes)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError, RecursionError) as error:
        raise LaunchError(
            f"another worker sent a wrong value ({str(error)[:100]}): another program writes here"
        ) from error


def _path_as_bytes(value: Any) -> bytes:
    # As bytes, because a path may hold characters that are not UTF-8.
    if isinstance(value, Path):
        return os.fsencode(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to other workers")


def _path_from_bytes(kind: Any, value: Any) -> Path:
    if kind is Path and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise TypeError(f"a {type(value).__name__} in place of {kind.__name__}")
