"""Writing and reading tensors by name with torch.distributed.checkpoint (DCP).

DCP writes and reads the files of each worker alone. Where several workers write together, DCP itself would send pickles
between them; here they agree on who writes which tensor (`choose_writers`), and send each other JSON. DCP's index of a
checkpoint, `.metadata`, is a pickle, and reading a pickle may run any code. So the index comes from manifest.json
instead; `.metadata` is written for torch's own tools and never read. DCP then reads only archives of one tensor each,
with `weights_only=True`.
"""

from __future__ import annotations

import ctypes
import errno
import io
import pickle
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeplan_launch.checkpoint.manifest import Manifest, SavedTensor
from pipeplan_launch.errors import DamagedCheckpoint, LaunchError
from pipeplan_launch.files import write_atomically

DCP_INDEX = ".metadata"


def choose_writers(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The member of a group that writes each tensor, by the bytes of the tensors that each member holds.

    Large tensors are dealt out first, each to the member that has the least to write so far. The result is the same
    in all members.
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
    """Write tensors into a folder, in a file with the number of this member of the group that writes together.

    `batch`: a number for the file's name, where a member writes several files. Returns the locations of the tensors.
    Raises `LaunchError`.
    """
    if not tensors:
        return {}
    planner, writer = _SavePlanner(), _Writer(folder)
    prefix = f"__{member}_" if batch is None else f"__{member}_{batch}_"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns about writing without other processes, which is intended
        try:
            planner.set_up_planner(dict(tensors), is_coordinator=True)
            writer.set_up_storage_writer(True)
            (plan,), _ = planner.create_global_plan([planner.create_local_plan()])
            plan = planner.finish_plan(replace(plan, storage_data=_StoragePrefix(prefix)))
            written = writer.write_data(writer.prepare_local_plan(plan), planner).wait()
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"writing {folder} failed: {_reason(error)}") from error
    return {one.index.fqn: _saved(tensors[one.index.fqn], one, planner.checks[one.index.fqn]) for one in written}


def _saved(tensor: Tensor, written: WriteResult, crc32: int) -> SavedTensor:
    info = written.storage_data
    dtype = str(tensor.dtype).removeprefix("torch.")
    return SavedTensor(dtype, tuple(tensor.shape), info.relative_path, info.offset, info.length, crc32)


def write_index(folder: Path, tensors: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Write DCP's own index of a checkpoint, for torch's tools. Returns its SHA-256 by its name. Raises `LaunchError`.

    It is a pickle that torch's tools trust, so a checkpoint whose index is another one is refused.
    """
    content = pickle.dumps(_metadata(tensors))
    write_atomically(folder / DCP_INDEX, lambda file: file.write(content))
    return {DCP_INDEX: sha256(content).hexdigest()}


def fill_tensors(manifest: Manifest, names: Mapping[str, Tensor]) -> None:
    """Fill tensors from the checkpoint, each from the saved tensor of its name. Raises `LaunchError`.

    They may be on any device, and of another dtype than the saved tensors.
    """
    targets = {}
    for name, target in names.items():
        saved = manifest.tensors.get(name)
        if saved is None:
            raise LaunchError(f"{manifest.folder} has no {name.partition('.')[2]!r}")
        if saved.shape != tuple(target.shape):
            raise LaunchError(
                f"{manifest.folder}: {name.partition('.')[2]!r} is {saved.shape}, the model's is {tuple(target.shape)}"
            )
        as_saved = target.device.type == "cpu" and target.dtype == dtype_of(saved) and target.is_contiguous()
        targets[name] = target.detach() if as_saved else empty_tensor(saved)
    if not targets:
        return
    with _in_one_line(f"reading {manifest.folder} failed", DamagedCheckpoint), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns about reading without other processes, which is intended
        dcp_load(dict(targets), storage_reader=_Reader(manifest, targets), planner=_LoadPlanner(manifest), no_dist=True)
    with torch.no_grad():
        for name, target in names.items():
            if targets[name].data_ptr() != target.data_ptr():
                target.copy_(targets[name])


def load_tensors(manifest: Manifest, names: Iterable[str]) -> dict[str, Tensor]:
    """Saved tensors on the CPU, with their saved dtypes. Raises `LaunchError`."""
    tensors = {}
    for name in names:
        if name not in manifest.tensors:
            raise LaunchError(f"{manifest.folder} has no {name!r}")
        tensors[name] = empty_tensor(manifest.tensors[name])
    fill_tensors(manifest, tensors)
    return tensors


def empty_tensor(saved: SavedTensor) -> Tensor:
    """Uninitialised memory for a saved tensor."""
    return torch.empty(saved.shape, dtype=dtype_of(saved))


def dtype_of(saved: SavedTensor) -> torch.dtype:
    """The dtype of a saved tensor. Raises `LaunchError` for one that no parameter can have."""
    dtype = getattr(torch, saved.dtype, None)
    if not isinstance(dtype, torch.dtype) or saved.dtype.startswith("q"):  # quantised tensors are never written
        raise LaunchError(f"the checkpoint holds a tensor of dtype {saved.dtype!r}, which no parameter can have")
    return dtype


class _SavePlanner(DefaultSavePlanner):
    """Computes a checksum of every tensor that this worker writes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.checks: dict[str, int] = {}

    def resolve_data(self, write_item: Any) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor)
        on_cpu = data.detach().cpu()
        self.checks[write_item.index.fqn] = checksum(on_cpu)
        return on_cpu


class _Writer(FileSystemWriter):
    """Reports an error of the disk in one line."""

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"writing {self.path} failed: {_reason(error)}") from error


class _Reader(FileSystemReader):
    """Finds tensors by the manifest instead of DCP's index."""

    def __init__(self, manifest: Manifest, names: Iterable[str]) -> None:
        """`names`: the tensors to read. Raises `LaunchError`."""
        super().__init__(manifest.folder)
        self._folder = manifest.folder
        self._described = _metadata({name: manifest.tensors[name] for name in names})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read one file after the other, so that an error names the file."""
        for name in dict.fromkeys(self._file(item) for item in plan.items):
            part = replace(plan, items=[item for item in plan.items if self._file(item) == name])
            try:
                super().read_data(part, planner).wait()
            except LaunchError:
                raise
            except Exception as error:
                # torch's own text may advise to load the file in an unsafe way. A damaged archive names invalid places.
                if any(isinstance(one, OSError) and one.errno != errno.EINVAL for one in _chain(error)):
                    raise
                raise DamagedCheckpoint(
                    f"{self._folder / name} is no archive of tensors as it was written: it was damaged or exchanged"
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file(self, item: ReadItem) -> str:
        return str(self.storage_data[item.storage_index].relative_path)

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        return self._described


def _metadata(tensors: Mapping[str, SavedTensor]) -> Metadata:
    """DCP's index of saved tensors."""
    described: dict[str, Any] = {}
    places = {}
    for name, saved in tensors.items():
        size, start = torch.Size(saved.shape), torch.Size([0] * len(saved.shape))
        properties = TensorProperties(dtype=dtype_of(saved))
        described[name] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(start, size)])
        places[MetadataIndex(name, start)] = _StorageInfo(saved.file, saved.offset, saved.bytes)
    return Metadata(described, storage_data=places)


class _LoadPlanner(DefaultLoadPlanner):
    """Compares every tensor with its checksum, and refuses entries that are not tensors, which DCP would unpickle."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._manifest = manifest

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise LaunchError(f"{self._manifest.folder}: {read_item.dest_index.fqn!r} is not a tensor")

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        name = read_item.dest_index.fqn
        saved = self._manifest.tensors[name]
        if checksum(tensor) != saved.crc32:
            path = self._manifest.folder / saved.file
            raise DamagedCheckpoint(
                f"{path} does not hold the values written for {name!r}: it was damaged or exchanged"
            )


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor on the CPU, in C order."""
    plain = tensor.detach().contiguous()
    size = plain.numel() * plain.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(plain.data_ptr())) if size else 0


@contextmanager
def _in_one_line(what: str, kind: type[LaunchError]) -> Iterator[None]:
    """Context that turns DCP's exceptions, which hold the failures of all workers, into one line of this kind."""
    try:
        yield
    except CheckpointException as error:
        first = error.failures[min(error.failures)][0]
        if isinstance(first, LaunchError):
            raise type(first)(str(first)) from error
        raise kind(f"{what}: {_reason(first)}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """The operating system's message, even if it is only in the context of an error of torch's archive writer."""
    for one in _chain(error):
        if isinstance(one, OSError):
            return one.strerror or str(one)
    return str(error).partition("\n")[0] or type(error).__name__
