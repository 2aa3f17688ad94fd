"""Python state: attributes that a forward pass changes and that a later pass depends on, such as a counter of steps.

torch.export would make a constant of the value during tracing. So tensors become buffers, whose changes are traced.
Numbers, alone or in lists and dictionaries, become buffers too, and the module that uses them is taken whole
(`opaque_modules.py`): it reads them from its buffers and writes them back. Like the statistics of a norm, they are then
saved in checkpoints, restored for recomputation, and agreed among replicas. Other state is refused. Attributes that no
later pass depends on are left alone: logs, caches, and values passed on within one pass.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.kept_values import ABSENT, Attribute, is_generator
from pipeplan_launch.job.pass_conditions import autocast, module_mode
from pipeplan_launch.tracing.attribute_reads import Accesses, accesses_noted
from pipeplan_launch.tracing.opaque_modules import PYTHON_STATE
from pipeplan_launch.tracing.python_state import Snapshot, restored_state

SMALL = 2
"""Samples in a minibatch that is run only to see what changes."""


@dataclass(frozen=True)
class CarriedState:
    """The changes that were made to a model for its Python state."""

    whole: tuple[str, ...]
    """Paths of the modules that must be taken whole, because they use numbers that change."""
    buffers: tuple[str, ...]
    """Names of the buffers that keep the state."""


def carry_python_state(job: Job, minibatch: int) -> CarriedState:
    """Turn the attributes that forward() changes, and that later passes depend on, into buffers.

    Raises `LaunchError` for state that cannot be kept.
    """
    runs = _Runs(job, minibatch)
    changed = runs.changed_attributes()
    accesses = runs.accesses(changed) if changed else {}
    known = {kept.attribute for one in job.model.modules() for kept in vars(one).get(PYTHON_STATE, ())}
    carried = [one for one in changed if accesses[one].is_carried or not accesses[one].place]
    state = runs.influential(carried) if carried else {}
    paths = {module: path for path, module in job.model.named_modules()}
    for attribute, values in state.items():
        if attribute in known:
            continue
        owner = attribute.owner
        if isinstance(owner, nn.Module) and isinstance(values[0], Tensor) and _keeps_kind(values):
            _make_buffer(owner, attribute.name, vars(owner).pop(attribute.name).detach())
            continue
        module = _module_around(job.model, attribute, accesses[attribute], values)
        vars(module).setdefault(PYTHON_STATE, []).append(PythonState(attribute, module, values))
    whole = tuple(path for module, path in paths.items() if vars(module).get(PYTHON_STATE))
    return CarriedState(whole, _kept_buffers(job.model))


def _kept_buffers(model: nn.Module) -> tuple[str, ...]:
    made = [(path, name) for path, module in model.named_modules() for name in vars(module).get(BUFFERS_MADE, ())]
    return tuple(f"{path}.{name}" if path else name for path, name in made)


BUFFERS_MADE = "_pipeplan_buffers"
"""The attribute of a module that lists the buffers that were made for its Python state."""


def _keeps_kind(values: Sequence[Any]) -> bool:
    first = values[0]
    return all(isinstance(one, Tensor) and (one.shape, one.dtype) == (first.shape, first.dtype) for one in values)


def _make_buffer(module: nn.Module, name: str, tensor: Tensor) -> None:
    module.register_buffer(name, tensor, persistent=False)
    vars(module).setdefault(BUFFERS_MADE, []).append(name)


def _module_around(model: nn.Module, attribute: Attribute, access: Accesses, values: Sequence[Any]) -> nn.Module:
    """The innermost module that makes all accesses to an attribute. Raises `LaunchError` if the attribute cannot be
    kept.
    """
    owner = attribute.owner
    path = next((path for path, module in model.named_modules() if module is owner), None)
    what = f"{attribute.name!r} of {type(owner).__name__}" + (f" ({path!r})" if path else "")
    at = f" ({access.place})" if access.place else ""
    begins = f"forward() changes the attribute {what}{at}, and later minibatches depend on it"
    if any(is_generator(leaf) for value in values for leaf in tree_leaves(value)):
        raise LaunchError(f"{begins}: draw from torch's own generator, which is seeded for each minibatch")
    problem = _problem(values)
    if problem:
        raise LaunchError(f"{begins}, but {problem}: {REMEDY}")
    around = [module for module in access.around or () if module is not model]
    if not around:
        raise LaunchError(f"{begins}, and no submodule is alone in using it: {REMEDY}")
    return around[-1]


REMEDY = "keep it in a tensor of fixed shape, made with register_buffer, and change it by tensor operations"


def _problem(values: Sequence[Any]) -> str:
    """Reason why a value cannot be kept in buffers; empty if there is none."""
    flat = [tree_flatten(value) for value in values]
    if any(value is ABSENT for value in values):
        return "it does not exist before the first one"
    if len({str(spec) for _, spec in flat}) > 1 or len({len(leaves) for leaves, _ in flat}) > 1:
        return "it grows or changes its structure"
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if all(isinstance(leaf, bool | int | float) for leaf in leaves) or _keeps_kind_or_none(leaves):
            continue
        return f"it holds {' and '.join(dict.fromkeys(type(leaf).__name__ for leaf in leaves))}"
    return ""


def _keeps_kind_or_none(leaves: Sequence[Any]) -> bool:
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return _keeps_kind(leaves)
    return all(leaf is leaves[0] or (isinstance(leaf, str) and leaf == leaves[0]) for leaf in leaves)


class PythonState:
    """An attribute whose numbers and tensors are kept in buffers of a module that is taken whole."""

    def __init__(self, attribute: Attribute, module: nn.Module, values: Sequence[Any]) -> None:
        self.attribute, self._module = attribute, module
        leaves, self._spec = tree_flatten(values[0])
        types = [[type(leaf) for leaf in column] for column in zip(*map(tree_leaves, values), strict=True)]
        self._constants = leaves
        self._buffers: dict[int, str] = {}
        for index, (leaf, kinds) in enumerate(zip(leaves, types, strict=True)):
            if isinstance(leaf, Tensor | bool | int | float):
                name = f"state_of_{attribute.name}" + (f"_{index}" if len(leaves) > 1 else "")
                while hasattr(module, name):
                    name += "_"
                _make_buffer(module, name, _as_tensor(leaf, kinds))
                self._buffers[index] = name

    @contextmanager
    def present(self) -> Iterator[None]:
        """Context in which the attribute has the value of the buffers. At the end the buffers get its new value."""
        buffers = self._module._buffers
        leaves = list(self._constants)
        for index, name in self._buffers.items():
            tensor: Any = buffers[name]
            leaves[index] = tensor.clone() if isinstance(leaves[index], Tensor) else tensor.item()
        vars(self.attribute.owner)[self.attribute.name] = tree_unflatten(leaves, self._spec)
        yield
        after, spec = tree_flatten(self.attribute.value)
        if spec != self._spec:
            raise LaunchError(f"the attribute {self.attribute.name!r} changed its structure in forward(): {REMEDY}")
        with torch.no_grad():
            for index, name in self._buffers.items():
                target: Any = buffers[name]
                target.copy_(after[index]) if isinstance(after[index], Tensor) else target.fill_(after[index])


def _as_tensor(leaf: Any, kinds: Sequence[type]) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if float in kinds:
        return torch.tensor(leaf, dtype=torch.float64)
    return torch.tensor(leaf, dtype=torch.bool if set(kinds) == {bool} else torch.int64)


@dataclass
class _Runs:
    """Runs of the unchanged model on small minibatches. Each leaves everything as it was."""

    job: Job
    minibatch: int
    samples: int = SMALL
    batches: dict[int, Batch] = field(default_factory=dict)

    def changed_attributes(self) -> list[Attribute]:
        """The attributes that a forward pass in training mode changes; none if the pass fails, which export will
        report.
        """
        for size in dict.fromkeys((min(SMALL, self.minibatch), self.minibatch)):
            self.samples = size
            try:
                with restored_state(self.job.model) as before:
                    self._run(size)
                    return before.changed()
            except Exception:
                continue
        return []

    def accesses(self, attributes: Sequence[Attribute]) -> dict[Attribute, Accesses]:
        """The reads and writes of these attributes in training and in evaluation."""
        with restored_state(self.job.model), accesses_noted(self.job.model, attributes) as noted:
            self._run(self.samples)
            self._run(self.samples, train=False)
        return noted

    def influential(self, attributes: Sequence[Attribute]) -> dict[Attribute, list[Any]]:
        """The attributes that are not just caches, with the values before each of three passes on the same minibatch.

        A cache has the same value after another pass on the same minibatch, and changes nothing on other minibatches.
        """
        values: dict[Attribute, list[Any]] = {one: [] for one in attributes}
        differing: list[Attribute] = []
        with restored_state(self.job.model):
            for _ in range(3):
                for one in attributes:
                    values[one].append(_frozen(one.value))
                before = Snapshot(self.job.model)
                self._run(self.samples)
                differing = before.changed()
                before.restore_buffers()
        accumulated = {one: found for one, found in values.items() if one in differing}
        return accumulated or (values if self._changes_others() else {})

    def _changes_others(self) -> bool:
        """Whether the state after one pass changes the outputs of another pass, on other samples."""
        other = self.minibatch if self.samples != self.minibatch else self.minibatch + 1
        pairs = zip(self._outcome(other, after=None), self._outcome(other, after=self.samples), strict=True)
        return not all(one.shape == two.shape and torch.equal(one, two) for one, two in pairs)

    def _outcome(self, samples: int, after: int | None) -> list[Tensor]:
        """Outputs and buffers of the model. With `after`, a pass on a minibatch of that size runs first."""
        with restored_state(self.job.model) as before:
            if after is not None:
                self._run(after)
                before.restore_buffers()
            outputs = [self._run(samples), self._run(samples, train=False)]
            tensors = [*tree_leaves(outputs), *self.job.model.buffers()]
            return [one.detach().clone() for one in tensors if isinstance(one, Tensor) and not one.is_meta]

    def _run(self, samples: int, *, train: bool = True) -> Any:
        """The model's output for the same minibatch and random numbers each time."""
        if samples not in self.batches:
            self.batches[samples] = self.job.example(samples)
        torch.manual_seed(0)
        random.seed(0)
        with module_mode(self.job.model, train), autocast(self.job.autocast, torch.device("cpu")):
            return copy.deepcopy(self.batches[samples]).call(self.job.model)


def _frozen(value: Any) -> Any:
    """A copy of a value that later changes to its tensors and containers do not affect."""
    leaves, spec = tree_flatten(value)
    return tree_unflatten([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
