"""torch.export of an unmodified module, in training mode, and what to say when it cannot be done."""

from __future__ import annotations

import inspect
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pipeplan_launch import evalmode
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job import Job
from pipeplan_launch.loading import describe, user_line
from pipeplan_launch.precision import autocast

DynamicShapes = tuple[dict[int, object], ...]
"""For each input the dimensions that are dynamic."""


@dataclass(frozen=True)
class Exported:
    """A flat graph of ATen operators whose `get_attr` nodes name the model's own parameters and buffers."""

    graph_module: fx.GraphModule
    dynamic_batch: bool
    """Whether the graph holds for any minibatch size, or only for the one it was traced at."""
    minibatch: int
    """Samples in the minibatch that it was traced at."""
    evaluation_problem: str | None
    """Why the graph cannot stand for the model in evaluation mode, or None."""


def export(job: Job, minibatch: int) -> Exported:
    """Export the job's model at this minibatch size, with a dynamic one where the model allows it."""
    # A dimension of size 1 is always taken as a constant, and so would make the graph static.
    traced_at = max(2, minibatch)
    inputs = job.example_inputs(traced_at)
    dynamic = _batch_dimensions(inputs, job.example_inputs(traced_at + 1), traced_at)
    if any(dynamic):
        try:
            graph_module = _export(job, inputs, dynamic)
        except Exception:
            # What is really wrong shows again below, where nothing is dynamic.
            graph_module = None
        if graph_module is not None and _is_dynamic(graph_module, dynamic):
            return Exported(graph_module, True, traced_at, _evaluation_problem(job, inputs, dynamic, graph_module))
    if traced_at != minibatch:
        inputs = job.example_inputs(minibatch)
    static: DynamicShapes = tuple({} for _ in inputs)
    try:
        graph_module = _export(job, inputs, static)
    except Exception as error:
        raise LaunchError(_why(job, inputs, error)) from error
    return Exported(graph_module, False, minibatch, _evaluation_problem(job, inputs, static, graph_module))


def _export(job: Job, inputs: tuple[Tensor, ...], dynamic: DynamicShapes, *, train: bool = True) -> fx.GraphModule:
    precision = autocast(job.autocast, torch.device("cpu"))
    with mode(job.model, train), precision, warnings.catch_warnings(), _quiet():
        # Export warns of what an LSTM does to itself while it is traced, which has no effect afterwards.
        warnings.simplefilter("ignore")
        exported = torch.export.export(job.model, inputs, dynamic_shapes=dynamic, strict=False)
        module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return _cleaned(module)


@contextmanager
def mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; every submodule gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs and prints about a failure, which is reported once, in our own words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()) as printed:
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        logging.disable(before)


def _batch_dimensions(some: tuple[Tensor, ...], more: tuple[Tensor, ...], minibatch: int) -> DynamicShapes:
    """For each input, the dimensions that follow the minibatch size, as `torch.export` wants them."""
    return tuple(
        {
            dimension: torch.export.Dim.AUTO
            for dimension, sizes in enumerate(zip(one.shape, other.shape, strict=False))
            if sizes == (minibatch, minibatch + 1)
        }
        for one, other in zip(some, more, strict=False)
    )


def _is_dynamic(graph_module: fx.GraphModule, dynamic: DynamicShapes) -> bool:
    """Whether every dimension that was asked to be dynamic is: AUTO quietly gives in where the model fixes it."""
    values = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    return all(
        isinstance(value.shape[dimension], torch.SymInt) and value.shape[dimension].node.maybe_as_int() is None
        for value, dimensions in zip(values, dynamic, strict=True)
        for dimension in dimensions
    )


def _cleaned(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Without the checks that export leaves behind and without dead code; mutations and random numbers stay."""
    for node in reversed(graph_module.graph.nodes):
        if node.op == "call_function" and not node.users and "_assert" in str(node.target):
            graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    return graph_module


def _evaluation_problem(
    job: Job, inputs: tuple[Tensor, ...], dynamic: DynamicShapes, trained: fx.GraphModule
) -> str | None:
    """Why the graph cannot stand for the model in evaluation mode, or None.

    Operators carry their mode and are changed, but a branch of the user's own on `self.training` is not in the graph.
    Only where the user's code mentions it is the model exported in evaluation mode as well, and compared.
    """
    suspects = sorted({type(module).__name__ for module in job.model.modules() if _mentions_mode(type(module))})
    if not suspects:
        return None
    problem = f"{', '.join(suspects)} does other work in evaluation mode than in training mode (self.training)"
    try:
        evaluated = _export(job, inputs, dynamic, train=False)
    except Exception as error:
        return f"{problem}, and cannot be traced in evaluation mode: {describe(error)}"
    return None if _operators(trained) == _operators(evaluated) else problem


def _mentions_mode(kind: type) -> bool:
    if kind.__module__.startswith("torch.nn."):
        return False
    try:
        return ".training" in inspect.getsource(kind)
    except (OSError, TypeError):
        return False


def _operators(graph_module: fx.GraphModule) -> list[str]:
    nodes = graph_module.graph.nodes
    return [str(node.target) for node in nodes if node.op == "call_function" and not evalmode.is_training_only(node)]


def _why(job: Job, inputs: tuple[Tensor, ...], error: Exception) -> str:
    """One line: whether the model itself fails on its inputs, or only cannot be traced."""
    try:
        with mode(job.model, train=True), autocast(job.autocast, torch.device("cpu")), torch.no_grad():
            job.model(*inputs)
    except Exception as own:
        shapes = ", ".join("×".join(map(str, one.shape)) for one in inputs)
        return f"the model {job.name!r} fails on its example inputs ({shapes}): {describe(own)}"
    place = user_line(error)
    at = f" ({place})" if place else ""
    if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
        return (
            f"the model {job.name!r} cannot be traced, because what it does depends on the data{at}; "
            "write it with torch.where or torch.cond, or move it out of forward()"
        )
    unknown = re.search(r"<class '([^']+)'> in output", str(error))
    if unknown is not None:
        kind = unknown[1].rpartition(".")[2]
        return (
            f"the model {job.name!r} returns an object of class {kind}, in which torch.export sees no tensors: call "
            f"torch.export.register_dataclass({kind}) where it is defined, or return tensors, tuples and dictionaries"
        )
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
    return f"the model {job.name!r} cannot be traced by torch.export{at}: {reason}"
