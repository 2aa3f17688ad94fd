"""Settings of allocators: keep the memory of freed CPU tensors in the process, and let a GPU's memory grow in place.

glibc returns blocks of more than 32 MiB to the system when they are freed, so that every large activation costs its
page faults again in every minibatch: a fifth of a ResNet-50's forward pass at 16 images. The profiler and the workers
both call this, so that one predicts the other. It costs memory: a tenth more was resident for the same network,
because blocks of other sizes do not always fit into what is kept.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import MutableMapping

# From malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_KEPT_BYTES = 1 << 30
"""Larger blocks are still returned to the system."""


GPU_VARIABLE, OLDER_GPU_VARIABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Settings of torch's allocator for GPUs; torch before 2.9 knows only the older name."""


def grow_gpu_memory(environment: MutableMapping[str, str], torch_version: str) -> None:
    """Have torch's allocator for GPUs grow its segments, which fragments less, unless the user has settings of it."""
    if GPU_VARIABLE in environment or OLDER_GPU_VARIABLE in environment:
        return
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    newer = numbers is None or (int(numbers[1]), int(numbers[2])) >= (2, 9)
    environment[GPU_VARIABLE if newer else OLDER_GPU_VARIABLE] = "expandable_segments:True"


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next minibatch. Returns whether it can; only glibc has this
    setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
