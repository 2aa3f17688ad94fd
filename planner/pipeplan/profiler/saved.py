"""Count the bytes that each layer keeps for the backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedBytes:
    """Bytes that autograd saves, by layer.

    Every storage counts once, for the layer that saves it first: within a stage that is exact. Where a cut runs
    between two layers that save the same tensor, the later stage holds it as what it received. Parameters, buffers
    and the model's inputs do not count: they are there anyway.
    """

    def __init__(self, not_counted: Iterable[Tensor]) -> None:
        self.by_layer: dict[str, int] = defaultdict(int)
        self._seen = {tensor.untyped_storage()._cdata for tensor in not_counted}
        # Alive until the end of the pass: a freed storage's address could be given to a new one.
        self._alive: list[Tensor] = []

    @contextmanager
    def watch(self, layer: str) -> Iterator[None]:
        """Charge what is saved in this context to the layer."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self._alive.append(tensor.detach())
                self.by_layer[layer] += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
