"""Export a model by torch.export, and fall back to opaque modules for the parts that it cannot trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pipeplan_launch import blame
from pipeplan_launch.aliasing import DependsOnData
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.exporting import Exported, depends_on_data, export, mode
from pipeplan_launch.job import Job, call_model
from pipeplan_launch.learning import unchanged
from pipeplan_launch.outputs import plain
from pipeplan_launch.precision import autocast
from pipeplan_launch.returns import Refused
from pipeplan_launch.usercode import describe, user_line


def export_somehow(job: Job, minibatch: int) -> tuple[Exported, str]:
    """(the exported model, a description of how it was exported). Raises `LaunchError` with the user's line."""
    opaque_modules = _OpaqueModules(job.model)
    while True:
        try:
            exported = export(job, minibatch, opaque_modules.paths)
            break
        except Exception as error:
            if not opaque_modules.paths:
                _check_model_runs(job, minibatch)
            path = opaque_modules.next(error)
            if path is None:
                raise LaunchError(_reason(job, error)) from error
            opaque_modules.add(path)
    if exported.left_out:
        _check_loss_without(job, exported.left_out)
    parts = ["torch.export"]
    if opaque_modules.paths:
        parts.append(f"taken whole: {', '.join(opaque_modules.paths)}")
    if exported.left_out:
        parts.append(f"left out of what it returns: {', '.join(exported.left_out)}")
    return exported, "; ".join(parts)


class _OpaqueModules:
    """The submodules that are exported as opaque modules, none inside another."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths: list[str] = []
        self._kinds: set[type] = set()

    def next(self, error: Exception) -> str | None:
        """The path of the submodule to make opaque because of this error, or None if there is none."""
        if isinstance(error, Refused):
            return blame.around(self.model, error.path)
        if isinstance(error, DependsOnData):
            path = blame.module_of_node(self.model, error.node)
        else:
            path = blame.module_of_error(self.model, error)
        while path is not None and any(blame.inside(path, opaque_path) for opaque_path in self.paths):
            path = blame.around(self.model, path)
        return path

    def add(self, path: str) -> None:
        """Make this module opaque, and from the second one of a class on all modules of that class, because each
        attempt is an export.
        """
        kind = type(self.model.get_submodule(path))
        chosen = blame.alike(self.model, path) if kind in self._kinds else [path]
        self._kinds.add(kind)
        for new in chosen:
            self.paths = [old for old in self.paths if not blame.inside(old, new)]
            if not any(blame.inside(new, old) for old in self.paths):
                self.paths.append(new)


def _check_model_runs(job: Job, minibatch: int) -> None:
    """Raises `LaunchError` if the model itself fails on its example inputs."""
    batch = job.example(minibatch)
    try:
        with _as_in_training(job):
            batch.call(job.model)
    except Exception as error:
        shapes = ["×".join(map(str, tensor.shape)) for tensor in batch.inputs]
        if batch.names:
            shapes = [f"{name} {shape}" for name, shape in zip(batch.names, shapes, strict=True)]
        raise LaunchError(
            f"the model {job.name!r} fails on its example inputs ({', '.join(shapes)}): {describe(error)}"
        ) from error


@contextmanager
def _as_in_training(job: Job) -> Iterator[None]:
    """Context for running the model as in training; afterwards its state is as before."""
    precision = autocast(job.autocast, torch.device("cpu"))
    with mode(job.model, train=True), unchanged(job.model), precision, torch.no_grad():
        yield


def _reason(job: Job, error: Exception) -> str:
    """One line that says why a model that runs cannot be traced."""
    if isinstance(error, Refused):
        return (
            f"the model {job.name!r} cannot be traced by torch.export, and its part {error.path!r} cannot be taken "
            f"whole either: it {error.why}; {_advice()}"
        )
    if isinstance(error, LaunchError):
        return str(error)
    odd = next((name for name, _ in job.model.named_modules() if set(name) & set('"\\\n\r')), None)
    if odd is not None and (isinstance(error, SyntaxError) or "<eval_with_key>" in f"{error}{describe(error)}"):
        return (
            f"the model {job.name!r} cannot be traced by torch.export while a module is called {odd!r}: take the "
            "quotes, backslashes and line breaks out of its name"
        )
    place = user_line(error)
    at = f" ({place})" if place else ""
    if depends_on_data(error):
        return f"the model {job.name!r} cannot be traced, because what it does depends on the data{at}; {_advice()}"
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
    return f"the model {job.name!r} cannot be traced by torch.export{at}: {reason}"


def _advice() -> str:
    return "write it with torch.where or torch.cond, or move it into a submodule of its own, which is then one layer"


def _check_loss_without(job: Job, left_out: tuple[str, ...]) -> None:
    """Raises `LaunchError` if the job's loss needs an object that cannot be sent between stages."""
    if job.loss is None or job.data is None:
        return  # the loss is never called without targets
    device = next((tensor.device for tensor in job.model.parameters()), torch.device("cpu"))
    batch = job.example_batch(2)
    inputs, target = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (batch.inputs, batch.target))
    try:
        with _as_in_training(job):
            job.loss(plain(call_model(job.model, inputs, batch.names), {}), target)
    except Exception as error:
        raise LaunchError(
            f"the model {job.name!r} returns an object of class {left_out[0]}, in which torch sees no tensors, and the "
            f"loss needs it ({describe(error)}): return tensors, dataclasses, tuples and dictionaries"
        ) from error
