"""Conditions of a pass other than weights and inputs: random numbers, the mode of modules, and autocast.

A seed depends on what is computed, not on the worker that computes it or on earlier passes.

`torch.export` records operators as the model calls them, before autocast adds casts. So the graph has no casts, but its
types are the types under autocast. Therefore a stage runs under the same autocast, and computes the same as the model,
bit by bit.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.devices.backend import backend_of, seed_generators
from pipeplan_launch.errors import LaunchError


def mix_seed(*parts: int | str) -> int:
    """A seed of 63 bits for this combination; changing any part gives an unrelated seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, before the user's code builds something."""
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_forward(seed: int, epoch: int, minibatch: int, stage: int) -> None:
    """Seed a stage's forward of a minibatch, so that dropout is the same on any replica and after a resume."""
    seed_generators(mix_seed("forward", seed, epoch, minibatch, stage))


def seed_loading(seed: int, epoch: int, minibatch: int) -> None:
    """Seed the reading of a minibatch's samples, so that random augmentation is the same at the first stage and at
    the last.
    """
    value = mix_seed("loading", seed, epoch, minibatch)
    seed_generators(value)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


@dataclass(frozen=True)
class RandomState:
    """State of a process's random generators: Python's, NumPy's if it is imported, and torch's."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: Tensor
    own: Tensor | None
    """State of the device's own generator; None if it has none."""
    device: torch.device

    @staticmethod
    def now(device: torch.device) -> RandomState:
        """The present state, on the host and on the device in use."""
        numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        own = backend_of(device).random_state(device)
        return RandomState(random.getstate(), numpy, torch.get_rng_state(), own, device)

    def restore(self) -> None:
        """Set the generators back to this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        backend_of(self.device).set_random_state(self.own, self.device)


@contextmanager
def module_mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Context in which the model is in training or evaluation mode. Afterwards every submodule has its own mode
    again.
    """
    modes = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was


# Autocast: computing in bfloat16 where possible, with weights, gradients and updates in the model's own precision.


def check_autocast_type(dtype: object) -> None:
    """Raises `LaunchError` for a type that a job cannot autocast to."""
    if dtype is None or dtype is torch.bfloat16:
        return
    if dtype is torch.float16:
        raise LaunchError("a job's autocast cannot be torch.float16, which needs its losses scaled: use torch.bfloat16")
    raise LaunchError(f"a job's autocast must be torch.bfloat16 or None, not {dtype!r}")


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Context for a forward pass and its loss; with None nothing is cast."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
