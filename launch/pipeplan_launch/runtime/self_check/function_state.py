"""The state that the user's functions keep between two calls: the job's loss, and the hooks of parameters.

A function may close over a number or a list, read a global variable, or be an object with attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from pipeplan_launch.job.reachable import reachable_values
from pipeplan_launch.job.user_code import is_user_code
from pipeplan_launch.runtime.self_check.kept_values import CONSTANTS, Kept, keep


def hooks_of(parameters: Mapping[str, Tensor]) -> list[Any]:
    """The hooks that `register_hook` has put on these parameters."""
    return [hook for one in parameters.values() for hook in (getattr(one, "_backward_hooks", None) or {}).values()]


class FunctionState:
    """The state of some functions at one moment."""

    def __init__(self, functions: Iterable[object]) -> None:
        self._kept: list[Kept] = []
        self._cells: list[tuple[CellType, Kept]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for function in functions:
            for _, value in reachable_values(function):
                if isinstance(value, FunctionType):
                    self._keep_variables(value)
                elif not isinstance(value, nn.Module):
                    self._kept.append(keep(value))

    def _keep_variables(self, function: FunctionType) -> None:
        """The numbers in the variables of the enclosing function, and in global variables, which it may set anew."""
        if not is_user_code(function.__code__.co_filename):
            return
        for cell in function.__closure__ or ():
            value = _content(cell)
            if isinstance(value, (*CONSTANTS, Tensor)):
                self._cells.append((cell, keep(value)))
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, self)
            if isinstance(value, (*CONSTANTS, Tensor)):
                self._globals.append((function.__globals__, name, value))

    def restore(self) -> None:
        """Bring everything back to this moment."""
        for kept in self._kept:
            kept.restore()
        for cell, kept in self._cells:
            cell.cell_contents = kept.restore()
        for variables, name, value in self._globals:
            variables[name] = value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return cell
