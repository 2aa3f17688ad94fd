"""Find and build the job that a reference names.

A reference is a bundled name (`mnist`), `path/to/file.py:callable` or `package.module:callable`. The callable takes
no argument and returns a module or a `Job`.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch import models
from pipeplan_launch.errors import LaunchError, nearest
from pipeplan_launch.job import Data, Job, repeat_to
from pipeplan_launch.seeds import mix, seed_everything

JOB_FILE_HINT = (
    "pipeplan cannot know its inputs: return pipeplan_launch.Job(model, inputs=lambda n: torch.randn(n, 3, 224, 224)) "
    "with the shape that it takes, or set model.example_input_array"
)


def load_job(ref: str, seed: int, device: str | None = None) -> Job:
    """Build the job that `ref` names. All random numbers are seeded first, and again before its `data`: every worker
    builds the same initial weights and the same data.

    With `device` the model is built there: on `meta` it has shapes and types and no data, however large it is. Raises
    `LaunchError` for whatever is wrong with the reference or happens in the user's code.
    """
    seed_everything(seed)
    build = _find(ref)
    seed_everything(seed)
    with torch.device(device) if device is not None else nullcontext():
        made = _run(ref, build)
    if isinstance(made, nn.Module):
        made = _job_of(ref, made)
    if not isinstance(made, Job):
        raise LaunchError(f"{ref!r} returned {type(made).__name__}: it must return a torch.nn.Module or a Job")
    return replace(made, name=made.name or _short_name(ref), data=_seeded(made.data, mix("data", seed)))


def _seeded(data: Callable[[], Data] | None, seed: int) -> Callable[[], Data] | None:
    """The same, whatever was drawn before it is called."""
    if data is None:
        return None

    def build() -> Data:
        seed_everything(seed)
        return data()

    return build


def canonical_ref(ref: str) -> str:
    """The reference that names the same job from any folder: a file's path is made absolute."""
    head, colon, attribute = ref.rpartition(":")
    if colon and _is_file_name(head):
        return f"{Path(head).resolve()}:{attribute}"
    return ref


def _find(ref: str) -> Callable[[], Any]:
    head, colon, attribute = ref.rpartition(":")
    if not colon:
        return _find_bundled(ref)
    if not head or not attribute:
        raise LaunchError(f"{ref!r} is not a model: write a bundled name, file.py:callable or package.module:callable")
    module = _import_file(ref, Path(head)) if _is_file_name(head) else _import_module(ref, head)
    found = getattr(module, attribute, None)
    if found is not None and not callable(found):
        kind = type(found).__name__
        raise LaunchError(f"{attribute!r} of {head} is of type {kind}: name a function that returns the model or a Job")
    if found is None:
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise LaunchError(f"{head} has no callable {attribute!r}: {nearest(attribute, known)}")
    return found  # type: ignore[no-any-return]


def _find_bundled(name: str) -> Callable[[], Job]:
    if name in models.BUNDLED:
        module = importlib.import_module(f"{models.__name__}.{name.replace('-', '_')}")
        build: Callable[[], Job] = module.build
        return build
    if _is_file_name(name):
        path = Path(name)
        if not path.is_file():
            raise LaunchError(f"there is no file {name}{_near(path)}")
        known = _functions(path)
        choice = known[0] if known else "callable"
        raise LaunchError(f"{name!r} does not say which callable of the file builds the model: write {name}:{choice}")
    if name.endswith(".json") and Path(name).is_file():
        raise LaunchError(f"{name} is no model: a profile is planned with, by pipeplan solve {name}")
    hint = nearest(name, models.BUNDLED)
    raise LaunchError(f"there is no bundled model {name!r}: {hint} (your own is written file.py:callable)")


def _functions(path: Path) -> list[str]:
    """Names of the functions and classes at the top level of a file, which is read and not run."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    # Those that build something come before those that help them.
    names = [node.name for node in sorted(functions, key=lambda node: (node.name != "build", not _makes_a_job(node)))]
    return names + [node.name for node in body if isinstance(node, ast.ClassDef)]


def _makes_a_job(node: ast.FunctionDef) -> bool:
    calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(isinstance(call, ast.Name | ast.Attribute) and ast.unparse(call).endswith("Job") for call in calls)


def _near(path: Path) -> str:
    """The file beside it of which the name is nearest."""
    there = path.parent if path.parent.is_dir() else None
    names = [] if there is None else [one.name for one in there.glob("*.py") if one.is_file()]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def _is_file_name(text: str) -> bool:
    return text.endswith(".py") or os.sep in text


def _import_file(ref: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise LaunchError(f"there is no file {path} (from {ref!r}){_near(path)}")
    # `python file.py` would put the file's folder first on the path; the user's own imports rely on it.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"pipeplan_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise LaunchError(f"{path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _run(ref, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    except LaunchError:
        del sys.modules[name]
        raise
    return module


def _import_module(ref: str, name: str) -> ModuleType:
    # As `python -m` does: the current folder comes first.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise LaunchError(
            f"there is no module {name!r} here or on the Python path (a file is written file.py:callable)"
        )
    module: ModuleType = _run(ref, lambda: importlib.import_module(name))
    return module


def _run(ref: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; whatever it raises becomes one line that quotes the place."""
    try:
        return call()
    except LaunchError:
        raise
    except (Exception, SystemExit) as error:
        raise LaunchError(f"{ref!r} failed: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """`Type: message (file:line: source line)` on one line, for the innermost frame of the user's own code."""
    message = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno}: {line})"
    place = user_line(error)
    if isinstance(error, RecursionError):
        message += "; nest it less deeply, or raise sys.setrecursionlimit where it is made"
    return f"{type(error).__name__}: {message}{f' ({place})' if place else ''}"


def user_line(error: BaseException) -> str | None:
    """`file:line: source line` of the innermost frame of the user's own code, if there is one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def is_user_code(filename: str) -> bool:
    """Whether a file is the user's: not torch's, not the standard library's, not this package's machinery."""
    path = Path(filename)
    if filename.startswith("<") or "site-packages" in path.parts or "dist-packages" in path.parts:
        return False
    ours = Path(__file__).parent
    if ours in path.parents:
        return ours / "models" in path.parents
    standard = Path(os.__file__).parent
    return standard not in path.parents and Path(torch.__file__).parent not in path.parents


def _job_of(ref: str, model: nn.Module) -> Job:
    """A job around a bare module, whose inputs are known only by the attribute that Lightning gave the name of."""
    example = getattr(model, "example_input_array", None)
    if example is None:
        raise LaunchError(f"{ref!r} returned a bare module, {type(model).__name__}: {JOB_FILE_HINT}")
    examples = list(example.values()) if isinstance(example, Mapping) else example
    examples = examples if isinstance(examples, list | tuple) else [examples]
    if not examples or not all(isinstance(one, Tensor) and one.ndim and len(one) for one in examples):
        raise LaunchError(
            f"the example_input_array of {ref!r} must be a tensor of at least one sample, or a tuple or a dictionary "
            "of such tensors"
        )
    if isinstance(example, Mapping):
        return Job(model, inputs=lambda n: {name: repeat_to(one, n) for name, one in example.items()})
    return Job(model, inputs=lambda n: tuple(repeat_to(one, n) for one in examples))


def _short_name(ref: str) -> str:
    head, _, attribute = ref.rpartition(":")
    return f"{Path(head).stem if _is_file_name(head) else head}:{attribute}" if head else ref
