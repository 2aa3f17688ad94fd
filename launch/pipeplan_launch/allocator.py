"""Keep the memory that tensors on the CPU are made of.

glibc gives blocks of more than 32 MiB back to the system when they are freed, so that every large activation costs its
page faults again in every minibatch: a fifth of a ResNet-50's forward pass at 16 images. The profiler and the workers
both call this, so that one predicts the other. It costs memory: a tenth more was resident for the same network, as
blocks of other sizes do not always fit into what is kept.
"""

from __future__ import annotations

import ctypes

# From malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_KEPT_BYTES = 1 << 30
"""Larger blocks still go straight to the system."""


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, for the next minibatch. Whether it can: other libraries are left alone."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
