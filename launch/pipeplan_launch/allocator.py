"""Keep the memory of freed CPU tensors in the process.

glibc returns blocks of more than 32 MiB to the system when they are freed, so that every large activation costs its
page faults again in every minibatch: a fifth of a ResNet-50's forward pass at 16 images. The profiler and the workers
both call this, so that one predicts the other. It costs memory: a tenth more was resident for the same network,
because blocks of other sizes do not always fit into what is kept.
"""

from __future__ import annotations

import ctypes

# From malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_KEPT_BYTES = 1 << 30
"""Larger blocks are still returned to the system."""


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next minibatch. Returns whether it can; only glibc has this
    setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
