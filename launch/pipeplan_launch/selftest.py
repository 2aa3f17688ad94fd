"""`python -m pipeplan_launch.selftest`: what torch can do here, as one line of JSON. Asked by `pipeplan doctor`.

torch         its version; null where it cannot be imported, then `error` says why
cuda          the CUDA that it was built with; null for none
cuda_devices  GPUs that it sees
nccl          the NCCL that it was built with; null for none
gloo          why two processes could not make an all-reduce over the loopback interface; empty if they could
sklearn       scikit-learn's version; null where it is missing
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

from pipeplan_launch.torch_here import lacking

PATIENCE_S = 10.0


def report() -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"torch": None, "sklearn": _version("scikit-learn")}
    if why := lacking():
        return found | {"error": why[0], "todo": why[1]}
    try:
        import torch
    except Exception as error:  # a broken installation fails in its own ways
        return found | {"error": f"torch cannot be imported: {' '.join(str(error).split())}", "todo": ""}
    # First, as what uses a GPU must not fork.
    gloo = _gloo()
    return found | {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cuda_devices": torch.cuda.device_count(),
        "nccl": _nccl(),
        "gloo": gloo,
    }


def _nccl() -> str | None:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        return None
    version: Any = torch.cuda.nccl.version  # torch gives it no types
    return ".".join(str(number) for number in version())


def _gloo() -> str:
    """Two processes add up a tensor: what is wrong, if anything."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = os.fork()
    if other == 0:
        # Its complaints would be the other's, said twice.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(0 if not _all_reduce(1, port) else 1)
    try:
        return _all_reduce(0, port)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def _all_reduce(rank: int, port: int) -> str:
    import torch
    import torch.distributed as dist

    try:
        patience = timedelta(seconds=PATIENCE_S)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", patience, world_size=2, rank=rank)
        tensor = torch.full((4,), float(rank + 1))
        dist.all_reduce(tensor)
        dist.barrier()
        return "" if tensor.tolist() == [3.0] * 4 else f"1 + 2 came out as {tensor.tolist()[0]:g}"
    except Exception as error:  # whatever torch makes of a network that does not work
        return " ".join(f"{error}".split())[:300]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(report()))
    sys.stdout.flush()
    os._exit(0)  # the process group has no peer left to say goodbye to
