"""Evicts a processor's caches between measurements, as an optimiser's update and other minibatches do in training."""

from __future__ import annotations

import time

import torch


class CacheEviction:
    """Memory that is read and written as a whole, so that the caches lose other data and code."""

    spent_s = 0.0
    """Processor time that the threads of this process have spent on it."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        """`size`: bytes that are read and written each time."""
        self._memory = torch.zeros(size // 4, device=device)

    def run(self) -> None:
        """Read and write everything once."""
        began = time.thread_time()
        self._memory.add_(1.0)
        CacheEviction.spent_s += time.thread_time() - began
