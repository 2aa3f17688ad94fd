"""Goldens that are texts: the files of plans, and the names of the executor's public API.

The help of every command and the API of the planner are in docs/reference, which `tests/docs/test_reference.py` holds
to the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import shlex
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pipeplan
import pipeplan_launch
from pipeplan.cli import main

INPUTS = Path(__file__).resolve().parent / "inputs"
COLUMNS = "100"
FILE_PLANS = {
    # A small plan that is chosen, by both solvers and with its certificate.
    "mnist-C": "mnist-v100 --cluster C",
    # Weight versions, replicas, and a model that branches.
    "gnmt8-C": "gnmt8-v100 --cluster C --schedule 1f1b-stashing --solver dp",
    "s2vt-A-2bw": "s2vt-v100 --cluster A --servers 2 --schedule 2bw --microbatch 80 --batch 2560 --solver dp",
    "alexnet-mixed-vertical": "alexnet-v100 --cluster mixed.toml --schedule vertical-sync --solver dp",
    "alexnet-B-inference": "alexnet-v100 --cluster B --inference --max-replicas 8 --solver dp",
    "mnist-C-gpipe": "mnist-v100 --cluster C --max-replicas 1 --stages 4 --schedule gpipe --microbatch 32 --batch 256 "
    "--solver dp",
    # Every target can express this one. Most of the others are refused, with a reason.
    "decoder-A-grid": "decoder.json --cluster A --servers 2 --for megatron --stages 4 --microbatch 4 --batch 128 "
    "--solver dp",
}
RENDERED = {
    "local": "local plan --force",
    "ssh": "ssh plan",
    "slurm": "slurm plan",
    "slurm with options": "slurm plan --partition gpu --time 12:00:00 --cpus 3 --setup 'module load x' -o other.slurm",
    "kubernetes": "kubernetes plan",
    "kubernetes with options": "kubernetes plan --pod-per-worker --options '--epochs 9' -o other.yaml",
}
EXPORTED = ("torch-pipelining", "torchtitan", "megatron", "deepspeed")
WHOLE = ("mnist-C", "alexnet-mixed-vertical")
"""Plans of which every launcher and every stage is frozen, as it is written: on equal servers, and on servers that
differ."""
LEFT_OUT = re.compile(r"plan/(launch-ssh\.sh|launch\.slurm|trainjob\.yaml|stages/stage-[1-9].*)|other\.\w+")
"""Files of the other plans that say nothing new."""


def files(every: int = 1) -> dict[str, str]:
    """Every file of some plans: of the plan folder, of every target of `export`.

    With `every` n only the first of every n plans is made.
    """
    found = {}
    for name, arguments in list(FILE_PLANS.items())[::every]:
        with _empty_folder():
            for path in INPUTS.iterdir():
                Path(path.name).write_bytes(path.read_bytes())
            given = {path.name for path in INPUTS.iterdir()}
            code, _, complaint = command("solve", *shlex.split(arguments))
            assert code == 0, complaint
            refused: dict[str, str] = {}
            profile = arguments.split()[0]
            beside = ("--profile", profile) if profile in given else ()  # others are found by themselves
            for kind, words in RENDERED.items():
                code, _, complaint = command("export", *shlex.split(words))
                if code:
                    refused[f"export {kind}"] = complaint
            for target in EXPORTED:
                code, _, complaint = command("export", target, "-o", f"exported/{target}", *beside)
                if code:
                    refused[f"export {target}"] = complaint
            for path in sorted(path for path in Path().rglob("*") if path.is_file() and path.name not in given):
                text = _normalised(path.read_bytes().decode("utf-8"))
                if name in WHOLE:
                    found[f"{name}/{path.as_posix()}"] = text
                elif not LEFT_OUT.fullmatch(path.as_posix()):
                    found[f"{name}/{path.as_posix()}"] = folded(text) if path.suffix == ".json" else text
            found |= {f"{name}/refused/{what}": text for what, text in refused.items()}
    return found


def api() -> dict[str, str]:
    """The public names of the executor with their signatures, and those of classes with their public members."""
    names = sorted(pipeplan_launch.__all__)
    lines = [line for name in names for line in _described(name, getattr(pipeplan_launch, name))]
    return {"pipeplan_launch": "\n".join(lines) + "\n"}


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `pipeplan` with these arguments, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    try:
        with (
            mock.patch.object(sys, "argv", ["pipeplan", *words]),
            mock.patch.dict(os.environ, COLUMNS=COLUMNS),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as stopped:
        code = stopped.code or 0
    return int(str(code)), out.getvalue(), err.getvalue()


def folded(text: str) -> str:
    """JSON whose innermost lists and objects are in one line each, unless that is long."""

    def in_one_line(found: re.Match[str]) -> str:
        line = f"{found[1]}{' '.join(found[2].split())}{found[3]}"
        return line if len(line) <= 240 else found[0]

    return re.sub(r"([\[{])\n([^\[\]{}]*)\n *([\]}])", in_one_line, text)


def _normalised(text: str) -> str:
    """A file without what differs between machines and runs: paths, the version, seconds spent."""
    text = text.replace(str(Path.cwd()), "<folder>").replace(sys.executable, "<python>")
    text = text.replace(f"pipeplan {pipeplan.__version__}", "pipeplan <version>")
    text = re.sub(r'("pipeplan": )"[^"]*"', r'\1"<version>"', text)
    text = re.sub(r'("seconds": )[0-9.e+-]+', r'\1"<seconds>"', text)
    # The phases of a search by their names, at the end of plan.json.
    return re.sub(r'("seconds": \{)[^}]*\}', lambda found: re.sub(r": [0-9.e+-]+", ': "<seconds>"', found[0]), text)


def _described(name: str, value: Any) -> list[str]:
    """A function by its signature; a class by that and by its public members; a constant by its value."""
    if not inspect.isclass(value):
        return [f"{name}{_signature(value)}" if callable(value) else f"{name} = {value!r}"]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    lines = [f"class {name}({bases}){': dataclass' if dataclasses.is_dataclass(value) else ''}"]
    lines.append(f"  {name}{_signature(value)}")
    fields = {field.name: field for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    for member in sorted({*fields, *dir(value)}):
        if member.startswith("_") or (issubclass(value, BaseException) and hasattr(Exception, member)):
            continue
        if member in fields:
            lines.append(f"  {member}: {_plain(str(fields[member].type))}")
            continue
        found = inspect.getattr_static(value, member)
        if isinstance(found, staticmethod | classmethod):
            lines.append(f"  {type(found).__name__} {member}{_signature(getattr(value, member))}")
        elif isinstance(found, types.FunctionType):
            lines.append(f"  {member}{_signature(found)}")
        elif isinstance(found, property):
            lines.append(f"  property {member}{_signature(found.fget).partition(')')[2]}")
        else:
            lines.append(f"  {member}: {type(found).__name__}")
    return lines


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    return _plain(str(signature))


def _plain(text: str) -> str:
    """A signature without the paths of modules and the addresses of functions."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text.replace("'", ""))
    return re.sub(r"\b(?:[a-z_][a-z_0-9]*\.)+(?=[A-Za-z_])", "", text)


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield
