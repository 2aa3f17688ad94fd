"""Writes and reads the tensors of a checkpoint, in safetensors files.

Each worker writes its own file, and manifest.json says which file has which tensor. Reading such a file runs no code.
Every tensor has a checksum, so that damage is found.
"""

from __future__ import annotations

import ctypes
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeplan_launch.checkpoint.manifest import Manifest, SavedTensor
from pipeplan_launch.errors import DamagedCheckpoint, LaunchError
from pipeplan_launch.files import explain_errors

_OS_ERROR = re.compile(r"I/O error: (.*) \(os error \d+\)")


def choose_writers(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Choose the member of a group that writes each tensor. `held`: the bytes of each member's tensors, by name.

    Large tensors are assigned first, each to the member with the least to write so far. The result is the same in all
    members.
    """
    bytes_of = {name: size for sizes in held for name, size in sizes.items()}
    loads, writers = [0] * len(held), {}
    for name in sorted(bytes_of, key=lambda name: (-bytes_of[name], name)):
        writer = min((member for member, sizes in enumerate(held) if name in sizes), key=lambda member: loads[member])
        loads[writer] += bytes_of[name]
        writers[name] = writer
    return writers


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], member: int = 0, batch: int | None = None
) -> dict[str, SavedTensor]:
    """Write tensors into a folder. `member`: this worker's number in the group that writes together; it names the file.

    `batch`: a number for the file's name, if a member writes several files. Returns the locations of the tensors.
    Raises `LaunchError`.
    """
    if not tensors:
        return {}
    path = folder / (f"tensors-{member}" + ("" if batch is None else f"-{batch}") + ".safetensors")
    plain = _without_overlaps({name: _as_saved(tensor) for name, tensor in tensors.items()})
    with explain_errors(path, "writing"):
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(plain, path)
        except SafetensorError as error:
            raise LaunchError(f"writing {path} failed: {_reason(error)}") from error
        path.chmod(mode)  # safetensors would make it readable only for its owner
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return {
        name: SavedTensor(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), path.name, checksum(plain[name])
        )
        for name, tensor in tensors.items()
    }


def fill_tensors(manifest: Manifest, names: Mapping[str, Tensor]) -> None:
    """Fill tensors from the checkpoint, each from the saved tensor of its name. Raises `LaunchError`.

    The tensors may be on any device, and may have another dtype than the saved tensors.
    """
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, target in names.items():
        saved = manifest.tensors.get(name)
        if saved is None:
            raise LaunchError(f"{manifest.folder} has no {name.partition('.')[2]!r}")
        if saved.shape != tuple(target.shape):
            raise LaunchError(
                f"{manifest.folder}: {name.partition('.')[2]!r} is {saved.shape}, the model's is {tuple(target.shape)}"
            )
        by_file[saved.file].append(name)
    for file, wanted in by_file.items():
        path = manifest.folder / file
        with torch.no_grad(), explain_errors(path, "reading"):
            try:
                with safe_open(path, framework="pt") as archive:
                    for name in wanted:
                        names[name].copy_(_checked(archive.get_tensor(name), manifest.tensors[name], path, name))
            except SafetensorError as error:
                raise DamagedCheckpoint(
                    f"{path} is no archive of tensors as it was written: it was damaged or exchanged"
                ) from error


def load_tensors(manifest: Manifest, names: Iterable[str]) -> dict[str, Tensor]:
    """Saved tensors on the CPU, with their saved dtypes. Raises `LaunchError`."""
    tensors = {}
    for name in names:
        if name not in manifest.tensors:
            raise LaunchError(f"{manifest.folder} has no {name!r}")
        saved = manifest.tensors[name]
        tensors[name] = torch.empty(saved.shape, dtype=_dtype_of(saved))
    fill_tensors(manifest, tensors)
    return tensors


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous tensor on the CPU."""
    size = tensor.numel() * tensor.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else 0


def frozen_checksums(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums of the parameters that are not trained, by name. Parameters that are divided among workers are left
    out."""
    return {
        name: checksum(_as_saved(one))
        for name, one in parameters.items()
        if not one.requires_grad and type(one) in (Tensor, nn.Parameter)
    }


def _as_saved(tensor: Tensor) -> Tensor:
    """The tensor on the CPU in C order. Complex numbers become pairs, because safetensors has no complex numbers of 128
    bits.
    """
    plain = tensor.detach().cpu().contiguous()
    return torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain


def _without_overlaps(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with a copy in place of each that shares memory with another: safetensors refuses shared memory."""
    end = 0
    for name in sorted(tensors, key=lambda name: tensors[name].data_ptr()):
        tensor = tensors[name]
        if tensor.data_ptr() < end:
            tensors[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.numel() * tensor.element_size())
    return tensors


def _checked(tensor: Tensor, saved: SavedTensor, path: Path, name: str) -> Tensor:
    """A tensor as it was saved. Raises `DamagedCheckpoint` if its values are not the values that were written."""
    found = tensor
    if (dtype := _dtype_of(saved)).is_complex and tensor.shape[-1:] == (2,):
        found = torch.view_as_complex(tensor)
    if (found.dtype, tuple(found.shape), checksum(tensor)) != (dtype, saved.shape, saved.crc32):
        raise DamagedCheckpoint(f"{path} does not hold the values written for {name!r}: it was damaged or exchanged")
    return found


def _dtype_of(saved: SavedTensor) -> torch.dtype:
    """The dtype of a saved tensor. Raises `LaunchError` for a dtype that no parameter can have."""
    dtype = getattr(torch, saved.dtype, None)
    if not isinstance(dtype, torch.dtype) or saved.dtype.startswith("q"):  # quantised tensors are never written
        raise LaunchError(f"the checkpoint holds a tensor of dtype {saved.dtype!r}, which no parameter can have")
    return dtype


def _reason(error: Exception) -> str:
    """The operating system's message in an error of safetensors, else the error's first line."""
    found = _OS_ERROR.search(str(error))
    return found[1] if found else str(error).partition("\n")[0]
