"""Export a model by torch.export, and fall back to opaque modules for the submodules that it cannot trace."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job, call_model
from pipeplan_launch.job.pass_conditions import autocast, module_mode
from pipeplan_launch.job.user_code import describe_error, user_line
from pipeplan_launch.tracing.aliasing import DependsOnData
from pipeplan_launch.tracing.export import ExportedModel, depends_on_data, export_model
from pipeplan_launch.tracing.export_hazards import Untraceable
from pipeplan_launch.tracing.forward_state import CarriedState, carry_python_state
from pipeplan_launch.tracing.model_outputs import without_unknown_objects
from pipeplan_launch.tracing.opaque_interface import CannotBeOpaque
from pipeplan_launch.tracing.python_state import Snapshot, restored_state
from pipeplan_launch.tracing.regions import module_calls


def export_with_fallback(job: Job, minibatch: int, whole: Sequence[str] = ()) -> tuple[ExportedModel, str]:
    """(the exported model, a description of how it was exported). `whole`: submodules that are opaque from the start.

    Raises `LaunchError` with the user's line.
    """
    with torch.random.fork_rng(devices=[]):
        state = carry_python_state(job, minibatch)
    before = Snapshot(job.model)
    try:
        return _export(job, minibatch, state, whole)
    finally:
        before.restore()


def _export(job: Job, minibatch: int, state: CarriedState, whole: Sequence[str]) -> tuple[ExportedModel, str]:
    opaque_modules = _OpaqueModules(job.model, whole)
    for own in state.whole:
        opaque_modules.add(own)
    while True:
        try:
            exported = export_model(job, minibatch, opaque_modules.paths)
            break
        except Exception as error:
            if not opaque_modules.paths:
                _check_model_runs(job, minibatch)
            path = opaque_modules.next(error)
            if path is None:
                raise LaunchError(_reason(job, error)) from error
            opaque_modules.add(path)
    exported = _taken_whole_for_evaluation(job, minibatch, exported, opaque_modules)
    if exported.left_out:
        _check_loss_without(job, exported.left_out)
    parts = ["torch.export"]
    if opaque_modules.paths:
        parts.append(f"taken whole: {', '.join(opaque_modules.paths)}")
    if state.buffers:
        parts.append(f"Python state kept in buffers: {', '.join(state.buffers)}")
    if exported.left_out:
        parts.append(f"left out of what it returns: {', '.join(exported.left_out)}")
    return exported, "; ".join(parts)


def _taken_whole_for_evaluation(
    job: Job, minibatch: int, exported: ExportedModel, opaque_modules: _OpaqueModules
) -> ExportedModel:
    """Export again with all modules opaque that do other work in evaluation mode, if each is one layer anyway.
    Otherwise return the unchanged model, which can be trained but not evaluated.
    """
    owners = dict.fromkeys(path.partition(f".{PARAMETRIZED}.")[0] for path in exported.differing)
    if not owners or not all(path and _is_one_layer(job.model.get_submodule(path)) for path in owners):
        return exported
    before = list(opaque_modules.paths)
    for path in owners:
        opaque_modules.add(path)
    try:
        whole = export_model(job, minibatch, opaque_modules.paths)
    except Exception:
        whole = exported
    if whole.evaluation_problem is not None:
        opaque_modules.paths = before
        return exported
    return whole


def _is_one_layer(module: nn.Module) -> bool:
    return not {name for name, _ in module.named_children()} - {PARAMETRIZED}


PARAMETRIZED = "parametrizations"
"""The child that torch.nn.utils.parametrize gives to a module."""


class _OpaqueModules:
    """The submodules that are exported as opaque modules, none inside another."""

    def __init__(self, model: nn.Module, paths: Sequence[str] = ()) -> None:
        known = {path for path, _ in model.named_modules() if path}
        if missing := next((path for path in paths if path not in known), None):
            raise LaunchError(
                f"the model has no module {missing!r}, which the plan takes whole: profile and solve again"
            )
        self.model = model
        self.paths: list[str] = list(paths)
        self._kinds: set[type] = set()

    def next(self, error: Exception) -> str | None:
        """The path of the submodule to make opaque because of this error, or None if there is none."""
        if isinstance(error, CannotBeOpaque):
            return enclosing_module(self.model, error.path)
        if isinstance(error, DependsOnData):
            path = module_of_node(self.model, error.node)
        else:
            path = module_of_error(self.model, error)
        while path is not None and any(is_same_or_inside(path, opaque_path) for opaque_path in self.paths):
            path = enclosing_module(self.model, path)
        return path

    def add(self, path: str) -> None:
        """Make this module opaque. If it is the second one of its class, make all modules of that class opaque, because
        each attempt costs an export.
        """
        kind = type(self.model.get_submodule(path))
        chosen = modules_of_same_class(self.model, path) if kind in self._kinds else [path]
        self._kinds.add(kind)
        for new in chosen:
            self.paths = [old for old in self.paths if not is_same_or_inside(old, new)]
            if not any(is_same_or_inside(new, old) for old in self.paths):
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
            f"the model {job.name!r} fails on its example inputs ({', '.join(shapes)}): {describe_error(error)}"
        ) from error


@contextmanager
def _as_in_training(job: Job) -> Iterator[None]:
    """Context for running the model as in training; afterwards its state is as before."""
    precision = autocast(job.autocast, torch.device("cpu"))
    with module_mode(job.model, train=True), restored_state(job.model), precision:
        yield


def _reason(job: Job, error: Exception) -> str:
    """One line that says why a model that runs cannot be traced."""
    if isinstance(error, CannotBeOpaque):
        return (
            f"the model {job.name!r} cannot be traced by torch.export, and its part {error.path!r} cannot be taken "
            f"whole either: it {error.why}; {_advice()}"
        )
    if isinstance(error, LaunchError):
        return str(error)
    odd = next((name for name, _ in job.model.named_modules() if set(name) & set('"\\\n\r')), None)
    if odd is not None and (isinstance(error, SyntaxError) or "<eval_with_key>" in f"{error}{describe_error(error)}"):
        return (
            f"the model {job.name!r} cannot be traced by torch.export while a module is called {odd!r}: take the "
            "quotes, backslashes and line breaks out of its name"
        )
    place = user_line(error)
    at = f" ({place})" if place else ""
    if depends_on_data(error):
        return f"the model {job.name!r} cannot be traced, because what it does depends on the data{at}; {_advice()}"
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
    remedy = "" if isinstance(error, Untraceable) else f"; {_advice()}"
    return f"the model {job.name!r} cannot be traced by torch.export{at}: {reason}{remedy}"


def _advice() -> str:
    return "write it with torch.where or torch.cond, or move it into a submodule of its own, which is then one layer"


def _check_loss_without(job: Job, left_out: tuple[str, ...]) -> None:
    """Raises `LaunchError` if the job's loss needs an object that cannot be sent between stages."""
    if job.loss is None or job.data is None:
        return  # without targets the loss is never called
    device = next((tensor.device for tensor in job.model.parameters()), torch.device("cpu"))
    batch = job.example_batch(2)
    inputs, target = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (batch.inputs, batch.target))
    try:
        with _as_in_training(job):
            job.loss(without_unknown_objects(call_model(job.model, inputs, batch.names), {}), target)
    except Exception as error:
        raise LaunchError(
            f"the model {job.name!r} returns an object of class {left_out[0]}, in which torch sees no tensors, and the "
            f"loss needs it ({describe_error(error)}): return tensors, dataclasses, tuples and dictionaries"
        ) from error


def module_of_error(model: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost submodule that was running when an error was raised; None for the model itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        frames = [frame for frame, _ in traceback.walk_tb(current.__traceback__)]
        running: list[str] = [paths[key] for one in frames if (key := id(one.f_locals.get("self"))) in paths]
        if running and running[-1]:
            return running[-1]
        waiting += [current.__context__, current.__cause__]
    return None


def module_of_node(model: nn.Module, node: fx.Node) -> str | None:
    """The path of the innermost submodule whose call made a node; None for the model itself."""
    stack = [*module_calls(node).values()]
    known = {path for path, _ in model.named_modules()}
    return next((path for path in reversed(stack) if path in known and path), None)


def enclosing_module(model: nn.Module, path: str) -> str | None:
    """The path of the nearest enclosing module that has a forward() of its own; None for the model itself."""
    while path := path.rpartition(".")[0]:
        if type(model.get_submodule(path)).forward is not nn.Module.forward:
            return path
    return None


def modules_of_same_class(model: nn.Module, path: str) -> list[str]:
    """The paths of all submodules of the same class as this one that do not lie inside another of them."""
    kind = type(model.get_submodule(path))
    paths: list[str] = []
    for candidate, module in model.named_modules():
        if candidate and type(module) is kind and not any(is_same_or_inside(candidate, chosen) for chosen in paths):
            paths.append(candidate)
    return paths


def is_same_or_inside(path: str, other: str) -> bool:
    """Whether the module at `path` is the module at `other`, or lies inside it."""
    return path == other or path.startswith(other + ".")
