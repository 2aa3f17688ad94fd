"""An optimiser's state as plain data, by parameter name, and back: also into the optimisers of other stages.

Every stage makes its optimiser over its own parameters. Under another cut of the model a stage's parameters may come
from several stages' optimisers: state follows the parameter, and a group takes the settings that its members had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan_launch import plain
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.usercode import user_code

Loader = Callable[[Iterable[str]], dict[str, Tensor]]
"""Loads saved tensors by name."""


def optimizer_state(
    optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`groups` and `state` as JSON, the tensors that they name). `parameters`: what it trains, by name.

    Raises `LaunchError` for what a file without code cannot hold.
    """
    content: dict[str, Any] = {"groups": [], "state": {}}
    tensors: dict[str, Tensor] = {}
    if optimizer is None:
        return content, tensors
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        names = [name_of[id(parameter)] for parameter in group["params"]]
        settings = {
            key: _encode(value, key, f"optim.groups.{names[0] if names else ''}.{key}", tensors)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        content["groups"].append({"kind": _kind(optimizer), "names": names, "settings": settings})
    for parameter, values in optimizer.state.items():
        name = name_of.get(id(parameter))
        if name is None:
            raise LaunchError(
                f"the optimiser {_kind(optimizer)} keeps state that belongs to no parameter, which a checkpoint "
                "cannot hold"
            )
        content["state"][name] = {
            key: _encode(value, key, f"optim.state.{name}.{key}", tensors) for key, value in values.items()
        }
    return content, tensors


def tensors_of(optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors of an optimiser's state."""
    states = optimizer.state.values() if optimizer is not None else ()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def merge(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimisers of all stages as one."""
    whole: dict[str, Any] = {"groups": [], "state": {}}
    for part in parts:
        whole["groups"] += part["groups"]
        whole["state"] |= part["state"]
    return whole


def load_optimizer(
    optimizer: Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
    load: Loader,
    where: str,
    own: Collection[str] = (),
) -> None:
    """Give an optimiser the state and the settings that were saved for its parameters, whichever stages had them.

    `own`: settings that it keeps. Raises `LaunchError` where the saved groups cannot become this optimiser's.
    """
    if optimizer is None:
        return
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    group_of = {name: group for group in saved["groups"] for name in group["names"]}
    state = {name: values for name in parameters if (values := saved["state"].get(name)) is not None}
    ours = [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    wanted = [*state.values(), *(group_of[name]["settings"] for names in ours for name in names if name in group_of)]
    tensors = load({tensor: None for values in wanted for one in values.values() for tensor in plain.tensors_in(one)})
    numbers = {name: index for index, name in enumerate(name for names in ours for name in names)}
    groups = []
    for names, group in zip(ours, optimizer.param_groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        settings |= _settings(names, group_of, _kind(optimizer), tensors, where, own)
        groups.append({**settings, "params": [numbers[name] for name in names]})
    decoded = {name: _decode(values, tensors, where) for name, values in state.items()}
    with user_code("the job's optimizer, which takes its saved state,"):
        optimizer.load_state_dict(
            {"state": {numbers[name]: values for name, values in decoded.items()}, "param_groups": groups}
        )
    _keep_dtypes(optimizer, parameters, decoded)


def _settings(
    names: list[str],
    group_of: Mapping[str, Any],
    kind: str,
    tensors: Mapping[str, Tensor],
    where: str,
    own: Collection[str],
) -> dict[str, Any]:
    """What the members of a group were saved with, which must be the same for all; without the group's own settings."""
    found: dict[str, Any] | None = None
    first = ""
    for name in names:
        group = group_of.get(name)
        if group is None:
            raise LaunchError(f"{where}: it has no settings of the optimiser for {name!r}, which was not trained then")
        if group["kind"] != kind:
            raise LaunchError(f"{where} was saved with the optimiser {group['kind']}, and the job's is {kind} now")
        settings = {key: one for key, one in _decode(group["settings"], tensors, where).items() if key not in own}
        if found is None:
            found, first = settings, name
        for key in found.keys() | settings.keys():
            if not _equal(found.get(key), settings.get(key)):
                raise LaunchError(
                    f"{where}: the job's optimiser puts {first!r} and {name!r} into one group, and they were saved "
                    f"with {key!r} {_short(found.get(key))} and {_short(settings.get(key))}: resume with a plan that "
                    "has them in different stages, as then"
                )
    return found or {}


def _keep_dtypes(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], decoded: Mapping[str, Mapping[str, Any]]
) -> None:
    """`load_state_dict` casts state to the dtype of its parameter, such as moments in float32 of one in bfloat16."""
    for name, values in decoded.items():
        state = optimizer.state[parameters[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and key in state and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)


def _encode(value: Any, key: str, name: str, tensors: dict[str, Tensor]) -> Any:
    try:
        return plain.encode(value, name, tensors)
    except plain.NotPlain as error:
        raise LaunchError(f"the optimiser's {key!r} is a {error}, which a checkpoint cannot hold") from error


def _decode(values: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    try:
        return {key: plain.decode(value, tensors) for key, value in values.items()}
    except plain.NotPlain as error:
        raise LaunchError(f"{where}: the optimiser's state is damaged: {error}") from error


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        return all(_equal(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}…"
