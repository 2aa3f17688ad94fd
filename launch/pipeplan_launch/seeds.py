"""Random numbers that depend on what is computed and not on who computes it, or what ran before."""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def mix(*parts: int | str) -> int:
    """A seed of 63 bits for this combination; any change of any part gives an unrelated one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Before the user's code builds something: Python's, NumPy's and torch's numbers are then the same everywhere."""
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_forward(seed: int, epoch: int, minibatch: int, stage: int) -> None:
    """Before a stage's forward of a minibatch: dropout is then the same on any replica, and after a resume."""
    _seed_torch(mix("forward", seed, epoch, minibatch, stage))


def seed_loading(seed: int, epoch: int, minibatch: int) -> None:
    """Before samples are read: random augmentation is then the same at the first stage and at the last."""
    value = mix("loading", seed, epoch, minibatch)
    _seed_torch(value)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % 2**32)


@dataclass(frozen=True)
class RandomState:
    """Where the random generators of a process are: Python's, NumPy's where it is in use, torch's."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: Tensor
    gpu: Tensor | None
    device: torch.device

    @staticmethod
    def now(device: torch.device) -> RandomState:
        """Their state now, on the CPU and on a GPU that is in use."""
        numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(random.getstate(), numpy, torch.get_rng_state(), gpu, device)

    def restore(self) -> None:
        """Draw from here on what was drawn after this state was taken."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


def _seed_torch(value: int) -> None:
    """What torch.manual_seed does, without its note of the whole call stack for each device that is not in use."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
