"""`python -m pipeplan_launch.capabilities`: prints the capabilities of the installed torch as one line of JSON.

`pipeplan doctor` runs it.

torch         version of torch; null if it cannot be imported, with the reason in `error` and the remedy in `todo`
cuda          version of CUDA that torch was built with; null for none
cuda_devices  number of GPUs that torch sees
nccl          version of NCCL that torch was built with; null for none
gloo          reason why an all-reduce of two processes over the loopback interface failed; empty if it did not
sklearn       version of scikit-learn; null if it is missing
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

from pipeplan_launch.torch_check import version_problem

PATIENCE_S = 10.0


def torch_report() -> dict[str, Any]:
    """The content of the JSON line."""
    base: dict[str, Any] = {"torch": None, "sklearn": _version("scikit-learn")}
    if problem := version_problem():
        return base | {"error": problem[0], "todo": problem[1]}
    try:
        import torch

        from pipeplan_launch.devices.backend import nccl_version
    except Exception as error:  # a broken installation may raise anything
        return base | {"error": f"torch cannot be imported: {' '.join(str(error).split())}", "todo": ""}
    # Gloo is tested first, because a process that has used a GPU must not fork.
    gloo = _gloo()
    return base | {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cuda_devices": torch.cuda.device_count(),
        "nccl": nccl_version(),
        "gloo": gloo,
    }


def _gloo() -> str:
    """The error when two processes all-reduce a tensor; "" if there is none."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = os.fork()
    if other == 0:
        # Both processes would print the same warnings.
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
    except Exception as error:  # torch may raise anything if the network does not work
        return " ".join(f"{error}".split())[:300]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(torch_report()))
    sys.stdout.flush()
    os._exit(0)  # skips the teardown of a process group whose peer is gone
