"""Gives the whole model and its stages the same random numbers, in whatever order the operators run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan_launch.job.pass_conditions import mix_seed, seed_everything

CALLS_ALIKE = 1000
"""Number of calls of one operator with one shape that draw the same numbers. Later calls draw other numbers, so that a
loop that draws until a number is accepted ends."""


class SameRandomNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds torch's generator before every operator that draws from it, by the operator and the shape of its operands.

    Stages may run operators in another order than the model. Without this class, dropout would then differ, although
    both are correct.
    """

    def __init__(self, seed: int, minibatch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._minibatch = seed, minibatch
        self._calls: Counter[str] = Counter()

    def __enter__(self) -> SameRandomNumbers:
        seed_everything(mix_seed("self-check", self._seed, self._minibatch))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            key = f"{func} {[tuple(one.shape) if isinstance(one, Tensor) else one for one in args]}"
            seed = mix_seed(self._seed, self._minibatch, self._calls[key] // CALLS_ALIKE, str(func))
            self._calls[key] += 1
            torch.default_generator.manual_seed(seed)
        return func(*args, **kwargs)
