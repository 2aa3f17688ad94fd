"""What the process that test workers are forked from imports: all that a worker ever does, so that none has to."""

from __future__ import annotations

PRELOADED = [
    "__main__",
    "torch._dynamo",
    "pipeplan_launch.worker",
    # A worker imports this beside its start, which takes a third of all that a small one computes.
    "pipeplan_launch.checkpoint.tensor_store",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "multiprocessing.synchronize",
]
