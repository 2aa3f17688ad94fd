"""Checks that all workers have the same data and that the replicas of a stage have the same initial weights.

Every worker builds its own data and weights. Without this check, workers with different data would silently train on
inputs and targets that do not belong together.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeplan_launch.errors import LaunchError


@dataclass(frozen=True)
class Fingerprint:
    """Digests of one worker's data and weights, which it sends to the others at the start."""

    rank: int
    stage: int
    data: dict[str, str] = field(default_factory=dict)
    """Numbers of samples and digests of samples, by their description in messages."""
    weights: str = ""
    """Digest of the stage's initial weights; empty if the stage has one replica."""
    job: str = ""
    """Digest of the file of the job; empty for a bundled model."""
    shared: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """For every trained parameter that stages share: (digest of its initial value, all stages that have it)."""
    read: dict[str, str] = field(default_factory=dict)
    """Digest of a minibatch, by its description in messages; empty if this worker does not read the data set."""

    def shared_by(self) -> set[tuple[int, ...]]:
        """The sets of stages that share parameters with this worker's stage."""
        return {stages for _, stages in self.shared.values()}


def check_agreement(fingerprints: Sequence[Fingerprint]) -> None:
    """Raise `LaunchError` if data or weights differ between workers. The message is the same in all workers."""
    same_seed = "the job's model must be built the same way, from the same seed, in every process"
    if found := _difference((one.rank, "", one.job) for one in fingerprints):
        raise LaunchError(
            f"the job's file differs between workers: it is not the same at {found.ranks}: copy one file to all servers"
        )
    names = fingerprints[0].data
    if found := _difference((one.rank, name, one.data.get(name, "")) for one in fingerprints for name in names):
        raise _different_data(found, found.values if str(found.name).startswith("the number") else "")
    if found := _difference((one.rank, *item) for one in fingerprints for item in one.read.items()):
        raise _different_data(found)
    if found := _difference((one.rank, one.stage, one.weights) for one in fingerprints):
        raise LaunchError(
            f"the initial weights of stage {found.name} differ between its replicas, {found.ranks}: {same_seed}"
        )
    if found := _difference((one.rank, name, mark) for one in fingerprints for name, (mark, _) in one.shared.items()):
        raise LaunchError(
            f"the initial values of {found.name!r}, which several stages share, differ between {found.ranks}: "
            f"{same_seed}"
        )


class _Difference(NamedTuple):
    """A name for which two workers have different marks."""

    name: str | int
    ranks: str
    values: str


def _difference(marks: Iterable[tuple[int, str | int, str]]) -> _Difference | None:
    """The first difference among the (rank, name, mark) of all workers; None if there is none."""
    known: dict[str | int, tuple[int, str]] = {}
    for rank, name, mark in marks:
        first, before = known.setdefault(name, (rank, mark))
        if before != mark:
            return _Difference(name, f"ranks {first} and {rank}", f" ({before} and {mark})")
    return None


def _different_data(found: _Difference, values: str = "") -> LaunchError:
    return LaunchError(
        f"the data differs between workers: {found.name} is not the same at {found.ranks}{values}: make data() "
        "deterministic; a data set must not keep random samples, nor use the order of a set or the number of a process"
    )


def digest(value: Any) -> str:
    """Digest of the tensors and numbers in a nested structure. Other values in it are ignored."""
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
    if size:  # hashed in place: a copy of a large stage's weights would raise its peak memory
        hashed.update((ctypes.c_char * size).from_address(plain.data_ptr()))
