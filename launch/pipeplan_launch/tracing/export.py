"""torch.export of an unmodified module, in training mode."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.pass_conditions import autocast, module_mode
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.tracing import eval_mode, opaque_calls
from pipeplan_launch.tracing.aliasing import DependsOnData, GraphBehaviour, observe_behaviour
from pipeplan_launch.tracing.attribute_reads import assignments_copied
from pipeplan_launch.tracing.export_hazards import hazards_refused
from pipeplan_launch.tracing.model_outputs import plain_outputs
from pipeplan_launch.tracing.opaque_interface import OutputsByModule
from pipeplan_launch.tracing.opaque_modules import observe_calls, recording_forwards, replaced_forwards
from pipeplan_launch.tracing.regions import name_state_inside

DynamicShapes = tuple[dict[int, object], ...]
"""The dynamic dimensions of each input."""


@dataclass(frozen=True)
class ExportedModel:
    """A flat graph of ATen operators whose `get_attr` nodes name the model's own parameters and buffers."""

    graph_module: fx.GraphModule
    """Its placeholders follow the order of the job's inputs."""
    behaviour: GraphBehaviour
    """Results of running the graph on fake tensors."""
    dynamic_batch: bool
    """Whether the graph is valid for any minibatch size, or only for `minibatch`."""
    minibatch: int
    """Samples in the minibatch that the graph was traced with."""
    batch: Batch
    """The inputs that the graph was traced with."""
    evaluation_problem: str | None
    """Reason why the graph cannot represent the model in evaluation mode, or None."""
    differing: tuple[str, ...]
    """Paths of the modules that do other work in evaluation mode."""
    left_out: tuple[str, ...]
    """Classes of the objects that the model returns and the graph leaves out."""


def export_model(job: Job, minibatch: int, opaque_paths: Sequence[str] = ()) -> ExportedModel:
    """Export the job's model at this minibatch size, with a dynamic minibatch size if the model allows it.

    `opaque_paths`: the submodules to export as opaque modules. Raises any exception of torch.export, `Untraceable`,
    or `DependsOnData`.
    """
    # Export treats a dimension of size 1 as a constant, which would make the graph static.
    traced_at = max(2, minibatch)
    batch = job.example(traced_at)
    dynamic = _batch_dimensions(batch.inputs, job.example_inputs(traced_at + 1), traced_at)
    if any(dynamic):
        try:
            # Sizes that depend on the data are unlikely to be linear in the minibatch size in four runs.
            calls = observe_calls(job, opaque_paths, (traced_at, traced_at + 1, traced_at + 2, traced_at))
            exported = _Attempt(job, batch, traced_at, dynamic, calls).run()
        except Exception as error:
            if depends_on_data(error):
                raise
            # An error that has nothing to do with dynamic sizes occurs again in the static export below.
            exported = None
        if exported is not None and _is_dynamic(exported.graph_module, dynamic):
            return exported
    if traced_at != minibatch:
        batch = job.example(minibatch)
    static: DynamicShapes = tuple({} for _ in batch.inputs)
    return _Attempt(job, batch, minibatch, static, observe_calls(job, opaque_paths, (minibatch, minibatch))).run()


def depends_on_data(error: BaseException) -> bool:
    """Whether an error means that the model's control flow or sizes depend on its data."""
    kind = type(error).__name__
    return "data-dependent" in str(error).lower() or "DataDependent" in kind or isinstance(error, DependsOnData)


@dataclass(frozen=True)
class _Attempt:
    """One attempt to export a model, with given dynamic dimensions and opaque modules."""

    job: Job
    batch: Batch
    samples: int
    dynamic: DynamicShapes
    calls: OutputsByModule
    askers: set[type] = field(default_factory=set)
    """Classes of the modules whose mode was read by code outside of torch, or by parametrizations."""

    def run(self) -> ExportedModel:
        """Export in training mode, and also in evaluation mode if that might give another graph."""
        graph_module, left_out = self._export()
        with module_mode(self.job.model, train=True), autocast(self.job.autocast, torch.device("cpu")):
            behaviour = observe_behaviour(graph_module, self.batch.inputs)
        problem, differing = self._evaluation(graph_module)
        return ExportedModel(
            graph_module, behaviour, any(self.dynamic), self.samples, self.batch, problem, differing, tuple(left_out)
        )

    def _export(self, *, train: bool = True) -> tuple[fx.GraphModule, dict[str, None]]:
        job = self.job
        args: tuple[Tensor, ...] = self.batch.inputs
        kwargs: dict[str, Any] = {}
        dynamic: Any = self.dynamic
        if self.batch.names:
            args, kwargs = (), dict(zip(self.batch.names, self.batch.inputs, strict=True))
            dynamic = dict(zip(self.batch.names, self.dynamic, strict=True))
        with ExitStack() as stack:
            stack.enter_context(module_mode(job.model, train))
            stack.enter_context(autocast(job.autocast, torch.device("cpu")))
            stack.enter_context(quiet())
            stack.enter_context(hazards_refused())
            stack.enter_context(eval_mode.questions_noted(self.askers))
            forwards = recording_forwards(job.model, self.calls) | _with_named_inputs(job.model, self.batch)
            stack.enter_context(replaced_forwards(job.model, forwards))
            stack.enter_context(assignments_copied(job.model))
            left_out = stack.enter_context(plain_outputs(job.model))
            # Export warns that an LSTM changes itself while it is traced, which has no effect afterwards.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.callback(opaque_calls.forget_calls)
            exported = torch.export.export(job.model, args, kwargs, dynamic_shapes=dynamic, strict=False)
            module = exported.module(check_guards=False)
            assert isinstance(module, fx.GraphModule)
            opaque_calls.replace_recorded_calls(module)
        if self.batch.names:
            _order(module.graph, list(exported.call_spec.in_spec.child(1).context), self.batch.names)
        name_state_inside(module)
        return _cleaned(module), left_out

    def _evaluation(self, trained: fx.GraphModule) -> tuple[str | None, tuple[str, ...]]:
        """(the reason why the graph cannot represent evaluation mode, or None; the modules that differ in that mode).

        The operators of torch's modules carry their mode, and are converted. If other code reads the mode, the model is
        also exported in evaluation mode, and the two graphs are compared.
        """
        if not self.askers:
            return None, ()
        try:
            evaluated, _ = self._export(train=False)
        except Exception as error:
            problem = _other_work(self.askers)
            return f"{problem}, and cannot be traced in evaluation mode: {describe_error(error)}", ()
        differing = eval_mode.differing_modules(trained, evaluated)
        if not differing:
            return None, ()
        return _other_work(self._askers_around(differing)), differing

    def _askers_around(self, differing: Sequence[str]) -> set[type]:
        """Classes of modules that read their mode: for each differing module itself, or the nearest around it."""
        modules = self.job.model.named_modules(remove_duplicate=False)
        asking = {path: type(one) for path, one in modules if type(one) in self.askers}
        found = set()
        for path in differing:
            while path and path not in asking:
                path = path.rpartition(".")[0]
            found |= {asking[path]} if path in asking else set()
        return found or self.askers


def _other_work(kinds: set[type]) -> str:
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    return f"{names} does other work in evaluation mode than in training mode (self.training)"


def _with_named_inputs(model: nn.Module, batch: Batch) -> dict[str, Callable[..., Any]]:
    """A forward() with one parameter for each input, for a model whose forward() takes `*args` or `**kwargs`.

    Export cannot give dynamic shapes to `*args` and `**kwargs`. Returns {path of the model: forward()}, or {}.
    """
    forward = model.forward
    kinds = {parameter.kind for parameter in inspect.signature(forward).parameters.values()}
    if not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return {}

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    names = batch.names or [f"input_{index}" for index in range(len(batch.inputs))]
    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return {"": named}


@contextmanager
def quiet() -> Iterator[None]:
    """Context that hides torch's own logs about a failure. The failure is reported once, by an error of this
    package.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()) as printed:
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        logging.disable(before)


def _batch_dimensions(inputs: tuple[Tensor, ...], larger: tuple[Tensor, ...], minibatch: int) -> DynamicShapes:
    """For each input, the dimensions that follow the minibatch size, in the form that `torch.export` takes."""
    return tuple(
        {
            dimension: torch.export.Dim.AUTO
            for dimension, sizes in enumerate(zip(tensor.shape, larger_tensor.shape, strict=False))
            if sizes == (minibatch, minibatch + 1)
        }
        for tensor, larger_tensor in zip(inputs, larger, strict=False)
    )


def _is_dynamic(graph_module: fx.GraphModule, dynamic: DynamicShapes) -> bool:
    """Whether every dimension requested as dynamic is dynamic. AUTO silently makes a size static if the model does."""
    values = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    return all(
        isinstance(value.shape[dimension], torch.SymInt) and value.shape[dimension].node.maybe_as_int() is None
        for value, dimensions in zip(values, dynamic, strict=True)
        for dimension in dimensions
    )


def _cleaned(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph without export's assertions and without dead code. Mutations and random operators stay."""
    for node in reversed(graph_module.graph.nodes):
        if node.op == "call_function" and not node.users and "_assert" in str(node.target):
            graph_module.graph.erase_node(node)
    opaque_calls.remove_dead_code(graph_module)
    return graph_module


def _order(graph: fx.Graph, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Reorder the placeholders, which export may have put in the order of forward()'s parameters."""
    by_name = dict(zip(names, graph.find_nodes(op="placeholder"), strict=True))
    start = next(iter(graph.nodes))
    for name in wanted:
        if by_name[name] is not start:
            start.prepend(by_name[name])
        else:
            start = start.next
