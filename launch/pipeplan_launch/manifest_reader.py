"""Reading and checking `manifest.json`, which is JSON, so that nothing in it is run. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeplan_launch import fields
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors
from pipeplan_launch.manifest import FORMAT, NAME, VERSION, History, Manifest, Position, SavedTensor


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest, and the sizes of its files. Raises `LaunchError`."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error
    where = str(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LaunchError(f"{path} is not the manifest of a checkpoint")
    version = fields.integer(content, "version", where, least=1)
    if version != VERSION:
        cure = "upgrade pipeplan" if version > VERSION else "it was written by an older pipeplan: train anew"
        raise LaunchError(f"{path} is of version {version}, and this pipeplan reads version {VERSION}: {cure}")
    manifest = _manifest(folder, content, where)
    _check_files(manifest)
    return manifest


def _manifest(folder: Path, content: dict[str, Any], where: str) -> Manifest:
    model = fields.mapping(content, "model", where)
    files = {
        _file_name(name, where): fields.integer({name: size}, name, where, least=0)
        for name, size in fields.mapping(content, "files", where).items()
    }
    tensors = fields.mapping(content, "tensors", where)
    manifest = Manifest(
        folder=folder,
        position=_position(content, where),
        history=_history(fields.mapping(content, "history", where), where),
        minibatch_samples=fields.integer(content, "minibatch_samples", where, least=1),
        samples=fields.integer(content, "samples", where, least=1),
        seed=fields.integer(content, "seed", where, least=0),
        plan=fields.text(content, "plan", where),
        model_ref=fields.text(model, "ref", where),
        graph_hash=fields.text(model, "graph_hash", where),
        stages=tuple(_layers(stage, where) for stage in fields.listing(content, "stages", where)),
        state_dict=_names(fields.mapping(content, "state_dict", where), where),
        optimizer=_optimizer(fields.mapping(content, "optimizer", where), where),
        tensors={name: _tensor(name, tensor, files, where) for name, tensor in tensors.items()},
        files=files,
    )
    if manifest.finished > manifest.position.epoch + manifest.position.whole:
        raise LaunchError(f"{where}: it has the results of {manifest.finished} epochs but ends earlier: it was damaged")
    return manifest


def _position(content: dict[str, Any], where: str) -> Position:
    minibatches = fields.integer(content, "minibatches", where, least=1)
    minibatch = fields.integer(content, "minibatch", where, least=0, most=minibatches)
    return Position(fields.integer(content, "epoch", where, least=0), minibatch, minibatches)


def _history(content: dict[str, Any], where: str) -> History:
    results = content.get("results")
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise LaunchError(f"{where}: 'results' must be a list of objects")
    if [result.get("epoch") for result in results] != list(range(1, len(results) + 1)):
        raise LaunchError(f"{where}: 'results' must list the epochs from 1 on")
    total = content.get("loss_sum")  # negative for some losses, null if it was not finite
    if total is not None and (not isinstance(total, int | float) or isinstance(total, bool)):
        raise LaunchError(f"{where}: 'loss_sum' must be a number or null")
    losses = fields.integer(content, "losses", where, least=0)
    return History(results, math.nan if total is None else float(total), losses)


def _layers(stage: Any, where: str) -> tuple[str, ...]:
    if not isinstance(stage, dict):
        raise LaunchError(f"{where}: every entry of 'stages' must be an object")
    return fields.names(stage, "layers", where)


def _names(content: Mapping[str, Any], where: str) -> dict[str, str]:
    if not all(isinstance(name, str) for name in content.values()):
        raise LaunchError(f"{where}: 'state_dict' must hold names")
    return dict(content)


def _optimizer(content: dict[str, Any], where: str) -> dict[str, Any]:
    groups, state = content.get("groups"), content.get("state")
    if not isinstance(state, dict) or not all(isinstance(entry, dict) for entry in state.values()):
        raise LaunchError(f"{where}: the optimiser's 'state' must hold an object for each parameter")
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        raise LaunchError(f"{where}: the optimiser's 'groups' must hold 'kind', 'names' and 'settings'")
    return {"groups": groups, "state": state}


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("kind"), str)
        and isinstance(group.get("settings"), dict)
        and isinstance(group.get("names"), list)
        and all(isinstance(name, str) for name in group["names"])
    )


def _tensor(name: str, content: Any, files: Mapping[str, int], where: str) -> SavedTensor:
    if not isinstance(content, dict):
        raise LaunchError(f"{where}: tensor {name!r} must be an object")
    shape = content.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise LaunchError(f"{where}: the shape of tensor {name!r} must be a list of whole numbers")
    tensor = SavedTensor(
        fields.text(content, "dtype", where),
        tuple(shape),
        fields.text(content, "file", where),
        fields.integer(content, "offset", where, least=0),
        fields.integer(content, "bytes", where, least=0),
        fields.integer(content, "crc32", where, least=0, most=2**32 - 1),
    )
    # An element takes at least one bit, so no shape can ask for more memory than the file's size justifies.
    if tensor.offset + tensor.size > files.get(tensor.file, -1) or math.prod(shape) > 8 * tensor.size:
        raise LaunchError(f"{where}: tensor {name!r} does not fit into the file that it names")
    return tensor


def _file_name(name: str, where: str) -> str:
    if Path(name).name != name:
        raise LaunchError(f"{where}: {name!r} is not the name of a file beside it")
    return name


def _check_files(manifest: Manifest) -> None:
    for name, size in manifest.files.items():
        path = manifest.folder / name
        with explain_errors(path, "reading"):
            actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise LaunchError(f"{path} is missing or not of the {size} bytes that {NAME} says: it was damaged")
