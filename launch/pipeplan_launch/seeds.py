"""Random numbers that depend on what is computed and not on who computes it, or what ran before."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


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


def _seed_torch(value: int) -> None:
    """What torch.manual_seed does, without its note of the whole call stack for each device that is not in use."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
