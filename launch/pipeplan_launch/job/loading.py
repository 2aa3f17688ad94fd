"""Find and build the job that a reference names.

A reference is the name of a bundled model (`mnist`), `path/to/file.py:callable` or `package.module:callable`. The
callable takes no argument and returns a module or a `Job`.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.errors import LaunchError, nearest
from pipeplan_launch.job import bundled_models
from pipeplan_launch.job.job import Data, Job, repeat_samples
from pipeplan_launch.job.pass_conditions import mix_seed, seed_everything
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.job_reference import is_file_name

JOB_FILE_HINT = (
    "pipeplan cannot know its inputs: return pipeplan_launch.Job(model, inputs=lambda n: torch.randn(n, 3, 224, 224)) "
    "with the shape that it takes, or set model.example_input_array"
)


def load_job(ref: str, seed: int, device: str | None = None) -> Job:
    """Build the job that `ref` names.

    All random generators are seeded first, and again before the job's `data` is built, so that every worker builds
    the same initial weights and the same data.

    With `device` the model is built on that device. On `meta` a model of any size has only shapes and types, and no
    data. Raises `LaunchError` if the reference is wrong or the user's code fails.
    """
    seed_everything(seed)
    build = _find(ref)
    seed_everything(seed)
    with torch.device(device) if device is not None else nullcontext():
        built = _run(ref, build)
    if isinstance(built, nn.Module):
        built = _job_of(ref, built)
    if not isinstance(built, Job):
        raise LaunchError(f"{ref!r} returned {type(built).__name__}: it must return a torch.nn.Module or a Job")
    return replace(built, name=built.name or _short_name(ref), data=_seeded(built.data, mix_seed("data", seed)))


def _seeded(data: Callable[[], Data] | None, seed: int) -> Callable[[], Data] | None:
    """The function that builds the data. It seeds the generators before each call, so that earlier draws have no
    effect.
    """
    if data is None:
        return None

    def build() -> Data:
        seed_everything(seed)
        return data()

    return build


def _find(ref: str) -> Callable[[], Any]:
    """The callable that a reference names. Raises `LaunchError`."""
    head, colon, attribute = ref.rpartition(":")
    if not colon:
        return _find_bundled(ref)
    if not head or not attribute:
        raise LaunchError(f"{ref!r} is not a model: write a bundled name, file.py:callable or package.module:callable")
    module = _import_file(ref, Path(head)) if is_file_name(head) else _import_module(ref, head)
    target = getattr(module, attribute, None)
    if target is not None and not callable(target):
        kind = type(target).__name__
        raise LaunchError(f"{attribute!r} of {head} is of type {kind}: name a function that returns the model or a Job")
    if target is None:
        candidates = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise LaunchError(f"{head} has no callable {attribute!r}: {nearest(attribute, candidates)}")
    return target  # type: ignore[no-any-return]


def _find_bundled(name: str) -> Callable[[], Job]:
    """The function that builds a bundled model. Raises `LaunchError` with a suggestion for anything else."""
    if name in bundled_models.BUNDLED:
        module_name, function = bundled_models.builder_of(name)
        module = importlib.import_module(f"pipeplan_launch.models.{module_name}")
        build: Callable[[], Job] = getattr(module, function)
        return build
    if is_file_name(name):
        path = Path(name)
        if not path.is_file():
            raise LaunchError(f"there is no file {name}{_near(path)}")
        functions = _functions(path)
        choice = functions[0] if functions else "callable"
        raise LaunchError(f"{name!r} does not say which callable of the file builds the model: write {name}:{choice}")
    if name.endswith(".json") and Path(name).is_file():
        raise LaunchError(f"{name} is not a model: to plan with a profile, run pipeplan solve {name}")
    hint = nearest(name, bundled_models.BUNDLED)
    raise LaunchError(f"there is no bundled model {name!r}: {hint} (your own is written file.py:callable)")


def _functions(path: Path) -> list[str]:
    """Names of the functions and classes at the top level of a file, which is parsed but not run."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    # Functions that build a job come before their helpers, because the first name is suggested to the user.
    names = [node.name for node in sorted(functions, key=lambda node: (node.name != "build", not _makes_a_job(node)))]
    return names + [node.name for node in body if isinstance(node, ast.ClassDef)]


def _makes_a_job(node: ast.FunctionDef) -> bool:
    """Whether a function calls `Job`."""
    calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return any(isinstance(call, ast.Name | ast.Attribute) and ast.unparse(call).endswith("Job") for call in calls)


def _near(path: Path) -> str:
    """A "did you mean" clause with the most similar Python file in the same folder, or an empty string."""
    folder = path.parent if path.parent.is_dir() else None
    candidates = [] if folder is None else [file.name for file in folder.glob("*.py") if file.is_file()]
    matches = difflib.get_close_matches(path.name, candidates, n=1, cutoff=0.6)
    return f"; did you mean {str(path.with_name(matches[0]))!r}?" if matches else ""


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
    # The current folder comes first, as with `python -m`.
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
    """Run the user's code. Any exception becomes a one-line `LaunchError` that quotes the place."""
    try:
        return call()
    except LaunchError:
        raise
    except (Exception, SystemExit) as error:
        raise LaunchError(f"{ref!r} failed: {describe_error(error)}") from error


def _job_of(ref: str, model: nn.Module) -> Job:
    """A job around a bare module, whose inputs come from `example_input_array`, the attribute that Lightning uses."""
    example = getattr(model, "example_input_array", None)
    if example is None:
        raise LaunchError(f"{ref!r} returned a bare module, {type(model).__name__}: {JOB_FILE_HINT}")
    examples = list(example.values()) if isinstance(example, Mapping) else example
    examples = examples if isinstance(examples, list | tuple) else [examples]
    if not examples or not all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) for tensor in examples):
        raise LaunchError(
            f"the example_input_array of {ref!r} must be a tensor of at least one sample, or a tuple or a dictionary "
            "of such tensors"
        )
    if isinstance(example, Mapping):
        return Job(model, inputs=lambda n: {name: repeat_samples(tensor, n) for name, tensor in example.items()})
    return Job(model, inputs=lambda n: tuple(repeat_samples(tensor, n) for tensor in examples))


def _short_name(ref: str) -> str:
    """The reference without folders, as the name of a job that has none: `file:callable`."""
    head, _, attribute = ref.rpartition(":")
    return f"{Path(head).stem if is_file_name(head) else head}:{attribute}" if head else ref
