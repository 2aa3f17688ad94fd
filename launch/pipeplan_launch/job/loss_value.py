"""The value of a job's loss: it must be one real number, and what it is otherwise is told by the name of the loss."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from pipeplan_launch.errors import LaunchError


def loss_text(loss: object) -> str:
    """The job's loss in messages, with the name that its author gave it: `the job's loss (cross_entropy)`."""
    called = loss
    while isinstance(called, functools.partial):
        called = called.func
    name = getattr(called, "__qualname__", None) or type(called).__qualname__
    name = name.rpartition("<locals>.")[2]
    code = getattr(called, "__code__", None)
    place = f" of {code.co_filename}:{code.co_firstlineno}" if name == "<lambda>" and code is not None else ""
    return f"the job's loss ({name.strip('<>')}{place})"


def checked_loss(loss: object, value: object) -> Tensor:
    """The value that a loss has returned, to start a backward pass from.

    Raises `LaunchError` unless it is a tensor with one real number.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise LaunchError(
            f"{loss_text(loss)} must return a tensor with one number, the mean over the minibatch, not {_found(value)}"
        )
    return value


def loss_number(loss: object, value: object) -> float:
    """The value of a loss where nothing is trained, which may be a plain number. Raises `LaunchError` otherwise."""
    if isinstance(value, int | float):
        return float(value)
    return float(checked_loss(loss, value))


def constant_loss_message(loss: object) -> str:
    """The error for a loss from which no gradient leads back."""
    return f"{loss_text(loss)} does not depend on any parameter that can be trained"


def _found(value: Any) -> str:
    """A value that is no loss, and what to write where that is clear."""
    if not isinstance(value, Tensor):
        return f"a value of type {type(value).__name__}"
    if value.is_complex():
        return f"{value.dtype}"
    advice = ": take the mean, as with reduction='mean'" if value.numel() > 1 else ""
    return f"one of shape {tuple(value.shape)}{advice}"
