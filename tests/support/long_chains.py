"""Chains of layers, and counts that stand in for a clock."""

from __future__ import annotations

import cProfile
import itertools
import pstats
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile


def long_chain(layers: int, *, seed: int = 0, spread: float = 0.02, scale: float = 1.0) -> Profile:
    """Layers in a row: 1.5 to 4.5 ms, 40 to 400 KB of parameters, 0.5 to 2 MB saved, 20 to 80 KB across.

    `spread` is the interquartile range of every time, relative; `scale` multiplies all sizes.
    """
    rng = random.Random(seed)
    made = []
    for number in range(layers):
        forward, backward = rng.uniform(0.5, 1.5) * 1e-3, rng.uniform(1, 3) * 1e-3
        weights, saved = int(rng.uniform(4e4, 4e5) * scale), int(rng.uniform(5e5, 2e6) * scale)
        spreads = {"forward_spread_s": forward * spread, "backward_spread_s": backward * spread}
        made.append(Layer(f"l{number}", forward, backward, weights, saved, **spreads))
    tensors = tuple(
        Tensor(f"t{number}", f"l{number}", (f"l{number + 1}",), int(rng.uniform(2e4, 8e4) * scale), int(4e4 * scale))
        for number in range(layers - 1)
    )
    return Profile(layers=tuple(made), tensors=tensors, minibatch=1, optimizer_state_ratio=2.0)


def calls_of(work: Callable[[], object]) -> int:
    """The number of function calls that some work takes, which is the same on every machine."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def chain(layers: Iterable[Layer], sent: int | Sequence[int], minibatch: int = 1, **more: Any) -> Profile:
    """A profile of layers in a row, with the bytes of each activation between two, which are those of its gradient."""
    made = tuple(layers)
    sizes = [sent] * (len(made) - 1) if isinstance(sent, int) else sent
    ends = zip(itertools.pairwise(made), sizes, strict=True)
    tensors = (Tensor(f"t{n}", one.name, (two.name,), size, size) for n, ((one, two), size) in enumerate(ends))
    return Profile(made, tuple(tensors), minibatch, **more)


class Ticks:
    """Times calls by `now`, a counter that what is timed advances."""

    how = "ticks"

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run the call; the returned function gives how far the counter grew."""
        before = self.now()
        call()
        taken = float(self.now() - before)
        return lambda: taken

    def settle(self) -> None:
        """Nothing is under way."""
