"""Do the workers hold the same data and, among replicas, the same weights? Each builds its own; a run that mixes
several would train on inputs and targets that do not belong together, without a word.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.seeds import seed_loading
from pipeplan_launch.usercode import user_code


@dataclass(frozen=True)
class Fingerprint:
    """What one worker tells the others at the start."""

    rank: int
    stage: int
    data: dict[str, str] = field(default_factory=dict)
    """By a name for people: a number of samples, or the digest of one."""
    weights: str = ""
    """Of the stage's initial weights; empty where it has one replica only."""


def data_marks(name: str, dataset: Any, seed: int) -> dict[str, str]:
    """The length of a data set, and digests of its first, middle and last sample. Raises `LaunchError`."""
    with user_code("reading the job's data"):
        count = len(dataset)
        marks = {f"the number of {name} samples": str(count)}
        for index in sorted({0, count // 2, count - 1}) if count else ():
            seed_loading(seed, 0, index)
            marks[f"{name} sample {index}"] = digest(dataset[index])
    return marks


def check(fingerprints: Sequence[Fingerprint]) -> None:
    """Raises `LaunchError` that says what differs between which workers, the same in every worker."""
    first = fingerprints[0]
    for other in fingerprints[1:]:
        for what, mark in first.data.items():
            if other.data.get(what) != mark:
                values = f" ({mark} and {other.data.get(what)})" if what.startswith("the number") else ""
                raise LaunchError(
                    f"the data differs between workers: {what} is not the same at ranks {first.rank} and {other.rank}"
                    f"{values}: make data() deterministic"
                )
    known: dict[int, Fingerprint] = {}
    for one in fingerprints:
        before = known.setdefault(one.stage, one)
        if before.weights != one.weights:
            raise LaunchError(
                f"the initial weights of stage {one.stage} differ between its replicas, ranks {before.rank} and "
                f"{one.rank}: the job's model must be built the same way, from the same seed, in every process"
            )


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of named parameters and buffers."""
    return digest(dict(tensors))


def digest(value: Any) -> str:
    """Of the tensors and numbers in a nested structure; whatever else it holds does not count."""
    hashed = hashlib.blake2b(digest_size=16)
    _add(hashed, value)
    return hashed.hexdigest()


def _add(hashed: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Tensor):
        _add_tensor(hashed, value.detach())
    elif isinstance(value, bool | int | float | complex):
        hashed.update(f"{value!r};".encode())
    elif isinstance(value, Mapping):
        for key in value:
            hashed.update(f"{key};".encode())
            _add(hashed, value[key])
    elif isinstance(value, list | tuple):
        hashed.update(f"{len(value)};".encode())
        for inner in value:
            _add(hashed, inner)
    elif type(value).__module__ == "numpy":
        _add(hashed, value.tolist())


def _add_tensor(hashed: hashlib.blake2b, tensor: Tensor) -> None:
    hashed.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if size:  # the bytes where they are: a copy of a large stage's weights would count as its memory
        hashed.update((ctypes.c_char * size).from_address(plain.data_ptr()))
