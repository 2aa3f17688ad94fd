"""`python -m pipeplan_launch.export RUN_OR_CHECKPOINT -o model.pt`: exports a checkpoint as an ordinary state_dict.

The file is the same as from `torch.save(model.state_dict(), …)` for the user's own module. Read it with
`model.load_state_dict(torch.load("model.pt", weights_only=True))`. Writing it runs none of the user's code, unless the
checkpoint leaves out frozen weights: then the program builds the user's model. With `--loss` the file has the
state_dict of the job's loss. With `--adapter` the program builds the user's model, and peft saves its adapters in a
folder that `peft.PeftModel.from_pretrained` reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from pipeplan_launch.checkpoint import checkpoint, tensor_store
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX, Manifest
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import explain_errors, write_atomically
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.loss import LOSS_PREFIX
from pipeplan_launch.job.user_code import user_code_errors


def exported_state_dict(manifest: Manifest) -> dict[str, Tensor]:
    """The model's state_dict on the CPU. Tied parameters share their memory, as in the model. Raises `LaunchError`."""
    names = manifest.state_dict
    if not names:
        raise LaunchError(f"{manifest.folder} does not list the names of the model's state_dict: it cannot be exported")
    wanted = [MODEL_PREFIX + name for name in dict.fromkeys(names.values())]
    saved = tensor_store.load_tensors(manifest, [name for name in wanted if name not in manifest.frozen])
    if len(saved) < len(wanted):
        saved |= unsaved_weights(manifest)
    return {key: saved[MODEL_PREFIX + name] for key, name in names.items()}


def unsaved_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The frozen weights that the checkpoint does not hold, by name in a checkpoint. Builds the job's model for them.

    Raises `LaunchError` if the job builds other values.
    """
    built = load_job(manifest.model.ref, manifest.seed).model.state_dict(keep_vars=True)
    saved_as = {key: MODEL_PREFIX + name for key, name in manifest.state_dict.items()}
    unsaved = {name: built[key] for key, name in saved_as.items() if name in manifest.frozen}
    checkpoint.check_frozen_weights(manifest, unsaved, tensor_store.frozen_checksums(unsaved))
    return {name: one.detach() for name, one in unsaved.items()}


def exported_loss(manifest: Manifest) -> dict[str, Tensor]:
    """The state_dict of the job's loss, on the CPU. Raises `LaunchError` if the loss has none."""
    of_model, prefix = set(manifest.state_dict.values()), MODEL_PREFIX + LOSS_PREFIX
    names = [one for one in manifest.tensors if one.startswith(prefix) and one[len(MODEL_PREFIX) :] not in of_model]
    if not names:
        raise LaunchError(f"the loss of {manifest.folder} has neither parameters nor buffers: leave out --loss")
    return {name.removeprefix(prefix): one for name, one in tensor_store.load_tensors(manifest, names).items()}


def export_checkpoint(
    source: Path, output: Path, *, force: bool = False, loss: bool = False
) -> tuple[Manifest, int, int]:
    """Export a checkpoint, or the last checkpoint of a run folder. Returns (the checkpoint, number of tensors, bytes
    written). `loss`: whether to export the loss instead of the model.

    An existing `output` is replaced only with `force`. Raises `LaunchError`.
    """
    manifest = checkpoint.find_checkpoint(source)
    if output.is_dir():
        raise LaunchError(f"{output} is a folder: name the file to write")
    _check_free(output, force)
    content = exported_loss(manifest) if loss else exported_state_dict(manifest)

    def save(file: IO[bytes]) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's archive writer reports a full disk this way
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise LaunchError(f"writing {output} failed: {str(error).partition(chr(10))[0]}") from error

    return manifest, len(content), write_atomically(output, save)


def export_adapter(source: Path, output: Path, *, force: bool = False) -> tuple[Manifest, int, int]:
    """Export the adapters of a model of peft. Returns (the checkpoint, number of trained tensors, bytes written).
    `source`: as in `export_checkpoint`.

    It runs the user's code that builds the model, and peft. The folder `output` is written completely or not at all; an
    existing folder is replaced only with `force`. Raises `LaunchError`.
    """
    manifest = checkpoint.find_checkpoint(source)
    _check_free(output, force)
    model = load_job(manifest.model.ref, manifest.seed).model
    save = getattr(model, "save_pretrained", None)
    if save is None or not hasattr(model, "peft_config"):
        raise LaunchError(f"the model {manifest.model.ref!r} has no adapters of peft: leave out --adapter")
    with explain_errors(output, "writing"), tempfile.TemporaryDirectory(dir=output.absolute().parent) as part:
        with user_code_errors(f"saving the adapters of {manifest.model.ref!r}"):
            model.load_state_dict(exported_state_dict(manifest))
            save(str(folder := Path(part) / output.name))
        if output.is_dir():
            shutil.rmtree(output)
        os.replace(folder, output)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    return manifest, trained, sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


def _check_free(output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise LaunchError(f"{output} exists; give another path with -o, or --force to replace it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 2 after printing a one-line error."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeplan_launch.export",
        description="Write a checkpoint as the state_dict of the model that was trained.",
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a checkpoint, or a run folder")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write, e.g. model.pt")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--loss", action="store_true", help="write the state_dict of the job's loss instead")
    kinds.add_argument("--adapter", action="store_true", help="write a folder with the adapters of a model of peft")
    options = parser.parse_args(arguments)
    source, output, force = options.source, options.output, options.force
    try:
        if options.adapter:
            manifest, count, size = export_adapter(source, output, force=force)
        else:
            manifest, count, size = export_checkpoint(source, output, force=force, loss=options.loss)
    except LaunchError as error:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    print(f"{options.output}: {count} tensors, {size / 2**20:.1f} MiB, after {manifest.position}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
