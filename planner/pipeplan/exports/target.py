"""The interface of a trainer that plans are exported to, and the writer of its files: all of them or none."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import write_text
from pipeplan.util.text import did_you_mean

# Name of a target: the module of its `TARGET`, which is imported on demand.
_MODULES: Mapping[str, str] = {
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "torch-pipelining": "torch_pipelining",
    "torchtitan": "torchtitan",
}

TARGET_NAMES = tuple(_MODULES)


@dataclass(frozen=True)
class ExportFile:
    """One of the files by which a trainer gets the plan."""

    text: str
    about: str
    """Description in a few words."""
    mode: int = 0o644


class ExportTarget(Protocol):
    """One trainer, in the exact version that its export was written for."""

    @property
    def name(self) -> str:
        """Name on the command line, such as `megatron`."""

    @property
    def title(self) -> str:
        """Name in messages, with the version, such as `Megatron-LM core_v0.16.1`."""

    def restrict(self, profile: Profile, options: Options) -> Options:
        """The options under which the target can express every plan, for `solve --for`.

        Raises `InputError` if it can express no plan for the profile and the user's options.
        """

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` if the target cannot express a plan.

        The error, which `refusal` makes, names the reason and the command that finds a plan for the target.
        """

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
        """The files for a plan that `refuse` has accepted, by name."""

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """One line on how to use the files in `folder`."""


def export_target(name: str) -> ExportTarget:
    """The target of that name. Raises `InputError`."""
    if name not in _MODULES:
        raise InputError(f"there is no export for {name!r}; {did_you_mean(name, TARGET_NAMES)}")
    target_module: ExportTarget = importlib.import_module(f"pipeplan.exports.{_MODULES[name]}").TARGET
    return target_module


def refusal(target: ExportTarget, plan: Plan, reason: str) -> InputError:
    """The error for a plan that a target cannot express: `reason` is a clause without a full stop."""
    # `solve --for` needs the global batch.
    batch = "" if plan.accumulate else " --batch SAMPLES"
    return InputError(
        f"{target.title} cannot express the plan {plan.config}: {reason}; "
        f"`pipeplan solve … --for {target.name}{batch}` finds the best plan that it can"
    )


def export_files(target: ExportTarget, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
    """The files of a target by name. Raises `InputError` for a plan that the target cannot express."""
    target.refuse(problem, plan)
    return target.files(problem, plan)


def refuse_to_overwrite_export(folder: Path, names: Collection[str], force: bool) -> None:
    """Raise `InputError` if files of these names cannot, or must not, be written to `folder`."""
    for parent in (folder, *folder.parents):
        if parent.exists() or parent.is_symlink():
            if not parent.is_dir():
                raise InputError(f"{parent} is not a folder; an export is written to one: give another with -o")
            break
    for name in names:
        if (folder / name).is_dir():
            raise InputError(f"{folder / name} is a folder, and the export has a file of that name: give -o another")
        if (folder / name).exists() and not force:
            raise InputError(f"{folder / name} exists: give another folder with -o, or --force to replace it")


def write_export(folder: Path, files: Mapping[str, ExportFile], *, force: bool = False) -> None:
    """Write all files into a folder, or none. With `force` they replace existing ones. Raises `InputError`."""
    refuse_to_overwrite_export(folder, files, force)
    created = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-export.", dir=folder))
        try:
            for name, file in files.items():
                write_text(scratch / name, file.text, mode=file.mode)
            for name in files:
                (scratch / name).replace(folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            for created_folder in created:
                if created_folder.is_dir() and not any(created_folder.iterdir()):
                    created_folder.rmdir()
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def _missing(folder: Path) -> list[Path]:
    """The folders of a path that do not exist yet, innermost first."""
    return [parent for parent in (folder, *folder.parents) if not parent.exists()]
