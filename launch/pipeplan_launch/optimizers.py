"""An optimiser's state as plain data, by parameter name: what a checkpoint can hold without any code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan_launch.errors import LaunchError

_PLAIN = (int, float, bool, str, type(None), Tensor)


def optimizer_state(optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """The optimiser's state by parameter name, and its groups with their settings. Plain values only.

    Raises `LaunchError` for a setting that a file without code cannot hold.
    """
    if optimizer is None:
        return {"state": {}, "groups": []}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for key, value in settings.items():
            if not _is_plain(value):
                kind = type(value).__name__
                raise LaunchError(f"the optimiser's {key!r} is a {kind}, which a checkpoint cannot hold")
        groups.append({"names": [name_of[id(parameter)] for parameter in group["params"]], "settings": settings})
    state = {name_of[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "groups": groups}


def load_optimizer(
    optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Any], where: str
) -> None:
    """The inverse of `optimizer_state`, for an optimiser with the same groups."""
    if optimizer is None:
        return
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    ours = [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if ours != [group["names"] for group in saved["groups"]]:
        raise LaunchError(f"{where}: the job's optimiser groups the parameters otherwise than when it was saved")
    numbers = {name: index for index, name in enumerate(name for names in ours for name in names)}
    groups = [{**group["settings"], "params": [numbers[name] for name in group["names"]]} for group in saved["groups"]]
    optimizer.load_state_dict(
        {"state": {numbers[name]: values for name, values in saved["state"].items()}, "param_groups": groups}
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return isinstance(value, _PLAIN)
