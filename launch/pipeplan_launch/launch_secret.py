"""The secret of one launch, which only its own servers know. Torch-free.

PIPEPLAN_SECRET         the secret itself, at least 16 characters
PIPEPLAN_SECRET_FILE    a file that holds it, which nobody but its owner may read (mode 0600)

A run on one machine makes a secret of its own. The launchers for ssh and SLURM make one for each launch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from pipeplan_launch.errors import LaunchError

VARIABLE = "PIPEPLAN_SECRET"
FILE_VARIABLE = "PIPEPLAN_SECRET_FILE"
MIN_CHARACTERS = 16
_MAX_BYTES = 4096


def new_secret() -> str:
    """A secret that cannot be guessed."""
    return secrets.token_hex(32)


def read_secret(environment: Mapping[str, str]) -> str | None:
    """The secret of this launch, None if none is given. Raises `LaunchError` for one that is too short or too open."""
    secret, source = environment.get(VARIABLE, "").strip(), VARIABLE
    if not secret and (file := environment.get(FILE_VARIABLE)):
        secret, source = _from_file(Path(file)), file
    if not secret:
        return None
    if len(secret) < MIN_CHARACTERS:
        raise LaunchError(f"the secret in {source} is shorter than {MIN_CHARACTERS} characters: openssl rand -hex 32")
    return secret


def check_secret(environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` if a launch of several has no secret."""
    if read_secret(environment) is None:
        raise LaunchError(
            f"several servers need a secret by which they know each other: set {VARIABLE} to the same value on all of "
            f"them (openssl rand -hex 32), or {FILE_VARIABLE} to a file of mode 0600 that holds it"
        )


def key_of(environment: Mapping[str, str]) -> bytes:
    """The key that the secret gives; that of an empty secret if there is none."""
    return hashlib.sha256(b"pipeplan launch " + (read_secret(environment) or "").encode()).digest()


def stop_token(environment: Mapping[str, str]) -> str:
    """The value by which a request to stop shows that it comes from a worker of this launch."""
    return hmac.digest(key_of(environment), b"stop", "sha256").hex()


def _from_file(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise LaunchError(f"{FILE_VARIABLE}: {path} is not a regular file")
            if found.st_mode & 0o077:
                raise LaunchError(f"{FILE_VARIABLE}: others may read {path}: chmod 600 {path}")
            return os.read(descriptor, _MAX_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LaunchError(f"{FILE_VARIABLE}: reading {path} failed: {error.strerror or error}") from error
