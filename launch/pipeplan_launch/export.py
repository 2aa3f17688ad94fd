"""`python -m pipeplan_launch.export RUN_OR_CHECKPOINT -o model.pt`: exports a checkpoint as an ordinary state_dict.

The file is the same as from `torch.save(model.state_dict(), …)` for the user's own module. Read it with
`model.load_state_dict(torch.load("model.pt", weights_only=True))`. Writing it runs none of the user's code. With
`--loss` it is the state_dict of the job's loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from pipeplan_launch.checkpoint import checkpoint, tensor_store
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX, Manifest
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import write_atomically
from pipeplan_launch.job.loss import LOSS_PREFIX


def exported_state_dict(manifest: Manifest) -> dict[str, Tensor]:
    """The model's state_dict on the CPU. Tied parameters share their memory, as in the model. Raises `LaunchError`."""
    names = manifest.state_dict
    if not names:
        raise LaunchError(f"{manifest.folder} does not list the names of the model's state_dict: it cannot be exported")
    saved = tensor_store.load_tensors(manifest, [MODEL_PREFIX + name for name in dict.fromkeys(names.values())])
    return {key: saved[MODEL_PREFIX + name] for key, name in names.items()}


def exported_loss(manifest: Manifest) -> dict[str, Tensor]:
    """The state_dict of the job's loss, on the CPU. Raises `LaunchError` if it has none."""
    of_model, prefix = set(manifest.state_dict.values()), MODEL_PREFIX + LOSS_PREFIX
    names = [one for one in manifest.tensors if one.startswith(prefix) and one[len(MODEL_PREFIX) :] not in of_model]
    if not names:
        raise LaunchError(f"the loss of {manifest.folder} has neither parameters nor buffers: leave out --loss")
    return {name.removeprefix(prefix): one for name, one in tensor_store.load_tensors(manifest, names).items()}


def export_checkpoint(
    source: Path, output: Path, *, force: bool = False, loss: bool = False
) -> tuple[Manifest, int, int]:
    """(the checkpoint, tensors, bytes written). `source`: a checkpoint, or a run folder, whose last checkpoint is
    exported; with `loss` the state of the loss in place of the model.

    An existing `output` is replaced with `force` alone. Raises `LaunchError`.
    """
    manifest = checkpoint.find_checkpoint(source)
    if output.is_dir():
        raise LaunchError(f"{output} is a folder: name the file to write")
    if output.exists() and not force:
        raise LaunchError(f"{output} exists; give another file with -o, or --force to replace it")
    content = exported_loss(manifest) if loss else exported_state_dict(manifest)

    def save(file: IO[bytes]) -> None:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's archive writer reports a full disk this way
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise LaunchError(f"writing {output} failed: {str(error).partition(chr(10))[0]}") from error

    return manifest, len(content), write_atomically(output, save)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 2 after printing a one-line error."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeplan_launch.export",
        description="Write a checkpoint as the state_dict of the model that was trained.",
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a checkpoint, or a run folder")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write, e.g. model.pt")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--loss", action="store_true", help="write the state_dict of the job's loss instead")
    options = parser.parse_args(arguments)
    try:
        manifest, count, size = export_checkpoint(
            options.source, options.output, force=options.force, loss=options.loss
        )
    except LaunchError as error:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    print(f"{options.output}: {count} tensors, {size / 2**20:.1f} MiB, after {manifest.position}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
