"""Hidden state: state that a user's function changes, and that is not trained, saved or shared. Two calls reveal it.

A function with hidden state works in one process, but not in a pipeline. There every replica has its own state. A stage
that recomputes calls the function twice for a minibatch. A resumed run begins with the initial state again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.kept_values import Kept
from pipeplan_launch.job.loss import REMEDY, LossState, loss_text
from pipeplan_launch.job.nested_tensors import gradient_functions
from pipeplan_launch.job.reachable import reachable_values

LARGE_ELEMENTS = 1 << 22
"""Largest tensor, in elements, whose values are compared. For a larger tensor only its writes are counted."""


def check_loss(
    loss: Callable[[Any, Any], Any], state: LossState | None, output: Any, target: Any, names: Mapping[int, str]
) -> None:
    """Raise `LaunchError` if a loss depends on trained tensors, or changes state, outside of its own `state`.

    The loss is called on copies of an output of the model and a target. `names`: the name of each of the model's
    parameters that is known here, by its `id`.
    """
    leaves: list[Tensor] = []
    values: list[Any] = []

    def call() -> None:
        copied = tree_map_only(Tensor, lambda tensor: _leaf_copy(tensor, leaves), output)
        own = {} if state is None else {name: one.clone() for name, one in state.buffers().items()}
        given = tree_map_only(Tensor, Tensor.clone, target)
        values[:] = [loss(copied, given) if state is None else state.call(own, copied, given)]

    with torch.enable_grad():
        buffers = {} if state is None else state.buffers()
        remedy = "make it a buffer of a module that is the job's loss (register_buffer), or record it in a callback"
        refuse_hidden_state(loss_text(loss), loss, call, remedy, {id(one) for one in buffers.values()})
    known = {id(one) for one in leaves} | {id(one) for one in ({} if state is None else state.parameters()).values()}
    for leaf in trained_leaves(values[0]):
        if id(leaf) not in known:
            name = names.get(id(leaf))
            which = f"the model's parameter {name!r}" if name else f"a parameter of shape {tuple(leaf.shape)}"
            raise LaunchError(
                f"{loss_text(loss)} reads {which}, which it would find untrained in a pipeline: return what it needs "
                f"from the model" + ("" if name else f"; or {REMEDY}")
            )


def _leaf_copy(tensor: Tensor, leaves: list[Tensor]) -> Tensor:
    """A writable copy of a tensor. If the tensor has a gradient, it is a copy of a new leaf, which is added to
    `leaves`.
    """
    if tensor.requires_grad:
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1].clone()
    return tensor.clone()


def trained_leaves(value: object) -> list[Tensor]:
    """The leaves that would get gradients in a backward pass from a value."""
    return [function.variable for function in gradient_functions([value]) if hasattr(function, "variable")]


def refuse_hidden_state(
    what: str, function: object, call: Callable[[], object], remedy: str, known: Collection[int] = ()
) -> None:
    """Raise `LaunchError` if a call of `function` changes state that it can reach.

    `call` calls the function, always with the same arguments. `what` names it, as in "the job's loss", and `remedy`
    says what to write instead. `known`: ids of tensors that may change. The first call may fill caches; a change by the
    second call is state.
    """
    _call_alike(call)
    before = _snapshot(function, known)
    _call_alike(call)
    after = _snapshot(function, known)
    for path, value in after.items():
        if path not in before or not before[path].same(value):
            raise LaunchError(
                f"{what} changes {path!r} at every call, which no checkpoint holds and replicas do not share: {remedy}"
            )


def _call_alike(call: Callable[[], object]) -> None:
    """Call with the present random numbers, and restore the generators afterwards."""
    with torch.random.fork_rng(devices=[]):
        call()


def _snapshot(function: object, known: Collection[int]) -> dict[str, Kept]:
    """The present values of everything that a function can reach, by path; for a container only its length."""
    found: dict[str, Kept] = {}
    for path, value in reachable_values(function):
        if isinstance(value, Tensor):
            if id(value) not in known:
                is_small = value.numel() <= LARGE_ELEMENTS and value.layout is torch.strided and not value.is_meta
                found[path] = Kept(value, value.detach().clone() if is_small else (id(value), value._version))
        elif isinstance(value, bool | int | float | complex | str):
            found[path] = Kept(value, value)
        elif isinstance(value, list | set | deque | Mapping):
            found[path] = Kept(0, len(value))
    return found
