"""Checkpoints: a folder per finished epoch, one file per stage, keyed by the model's own parameter names.

A checkpoint exists when its `manifest.json` does: that file is written last, and moved into place, so a checkpoint that
was interrupted is ignored and the one before it is still whole. Files hold plain tensors and numbers, and are read with
`weights_only=True`: loading never runs code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from pipeplan_launch import fields
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors, write_atomically, write_json

FORMAT = "pipeplan-checkpoint"
VERSION = 1
KEPT = 2  # the latest and, in case its disk is not, the one before


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    folder: Path
    epoch: int
    """Epochs finished."""
    seed: int
    graph_hash: str
    layers: tuple[tuple[str, ...], ...]
    """Of each stage."""
    sizes: tuple[int, ...]
    """Bytes of each stage's file."""

    def stage_file(self, stage: int) -> Path:
        """Where a stage's state is."""
        return self.folder / f"stage-{stage}.pt"


def epoch_folder(run: Path, epoch: int) -> Path:
    """Where the checkpoint after so many epochs goes."""
    return run / "checkpoints" / f"epoch-{epoch:04d}"


def save_stage(
    folder: Path, stage: int, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], optimizer: dict[str, Any]
) -> None:
    """Write one stage's file; the checkpoint is not valid before `write_manifest`."""
    with explain_errors(folder, "making"):
        folder.mkdir(parents=True, exist_ok=True)
    state = {
        "parameters": {name: value.detach().cpu() for name, value in parameters.items()},
        "buffers": {name: value.detach().cpu() for name, value in buffers.items()},
        "optimizer": optimizer,
    }
    path = folder / f"stage-{stage}.pt"
    try:
        write_atomically(path, lambda file: _save(state, file))
    except RuntimeError as error:  # torch's archive writer reports a full disk this way
        raise LaunchError(f"writing {path} failed: {str(error).splitlines()[0]}") from error


def _save(state: dict[str, Any], file: IO[bytes]) -> None:
    torch.save(state, file)


def write_manifest(run: Path, epoch: int, seed: int, plan: LaunchPlan, graph_hash: str) -> None:
    """Make the checkpoint valid, once every stage's file is there; then drop older ones beyond `KEPT`."""
    folder = epoch_folder(run, epoch)
    sizes = []
    for stage in range(len(plan.pipeline)):
        path = folder / f"stage-{stage}.pt"
        if not path.is_file():
            raise LaunchError(
                f"{path} is not visible from here: the run folder must be on a file system that all share"
            )
        sizes.append(path.stat().st_size)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "epoch": epoch,
        "seed": seed,
        "plan": plan.plan,
        "model": {"ref": plan.model_ref, "graph_hash": graph_hash},
        "stages": [
            {"file": f"stage-{stage}.pt", "bytes": size, "layers": list(plan.layers[stage])}
            for stage, size in enumerate(sizes)
        ],
    }
    write_json(folder / "manifest.json", content)
    for old in sorted(path.parent for path in (run / "checkpoints").glob("epoch-*/manifest.json"))[:-KEPT]:
        (old / "manifest.json").unlink()  # first: a folder half deleted must not look valid
        shutil.rmtree(old, ignore_errors=True)


def latest(run: Path) -> Manifest | None:
    """The last complete checkpoint of a run folder, None if there is none. Raises `LaunchError` if it is damaged."""
    paths = list((run / "checkpoints").glob("epoch-*/manifest.json"))
    return read_manifest(max(paths)) if paths else None


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest and the sizes of the files that it names."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error
    where = str(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LaunchError(f"{path} is not the manifest of a checkpoint")
    if fields.integer(content, "version", where, least=1) > VERSION:
        raise LaunchError(f"{path} is newer than this pipeplan reads: upgrade pipeplan")
    stages = fields.listing(content, "stages", where)
    manifest = Manifest(
        path.parent,
        fields.integer(content, "epoch", where, least=0),
        fields.integer(content, "seed", where, least=0),
        fields.text(fields.mapping(content, "model", where), "graph_hash", where),
        tuple(fields.names(stage, "layers", where) for stage in stages),
        tuple(fields.integer(stage, "bytes", where, least=0) for stage in stages),
    )
    for stage, size in enumerate(manifest.sizes):
        file = manifest.stage_file(stage)
        if not file.is_file() or file.stat().st_size != size:
            raise LaunchError(f"{file} is missing or not of the {size} bytes that {path.name} says: it was damaged")
    return manifest


def check_fits(manifest: Manifest, plan: LaunchPlan, graph_hash: str) -> None:
    """Raises `LaunchError` if the checkpoint is of another model or of a plan with other stages."""
    if manifest.graph_hash != graph_hash:
        raise LaunchError(
            f"{manifest.folder} is of another model, or another version of {plan.model_ref!r}: its graph is "
            f"{manifest.graph_hash[:19]}…, the model's is {graph_hash[:19]}…; start anew without --resume"
        )
    if manifest.layers != plan.layers:
        raise LaunchError(
            f"{manifest.folder} was written under a plan that cuts the model otherwise ({len(manifest.layers)} stages; "
            f"this plan has {len(plan.layers)}): resume with that plan, or start from its weights with --weights"
        )


def read_stage(path: Path) -> dict[str, Any]:
    """A stage's file: `parameters`, `buffers` and `optimizer`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and storage errors of every kind: all mean a file that cannot be used
        raise LaunchError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not {"parameters", "buffers", "optimizer"} <= state.keys():
        raise LaunchError(f"{path} is not a stage of a checkpoint")
    return state


@torch.no_grad()
def load_tensors(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: str) -> None:
    """Copy saved tensors into parameters or buffers of the same names."""
    for name, target in targets.items():
        value = saved.get(name)
        if value is None:
            raise LaunchError(f"{where} has no {name!r}")
        if value.shape != target.shape:
            raise LaunchError(f"{where}: {name!r} is {tuple(value.shape)}, the model's is {tuple(target.shape)}")
        target.copy_(value)


def load_weights(manifest: Manifest, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Take a stage's weights from a checkpoint that any plan for the same model wrote."""
    saved: dict[str, Tensor] = {}
    wanted = parameters.keys() | buffers.keys()
    for stage in range(len(manifest.layers)):
        state = read_stage(manifest.stage_file(stage))
        saved |= {name: value for name, value in (state["parameters"] | state["buffers"]).items() if name in wanted}
    load_tensors(parameters, saved, str(manifest.folder))
    load_tensors(buffers, saved, str(manifest.folder))
