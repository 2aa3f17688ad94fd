"""`python -m pipeplan_launch.capabilities`: prints the capabilities of the installed torch as one line of JSON.

`pipeplan doctor` runs it.

torch         version of torch; null if it cannot be imported, with the reason in `error` and the remedy in `todo`
cuda          version of CUDA that torch was built with; null for none
cuda_devices  number of GPUs that torch sees
nccl          version of NCCL that torch was built with; null for none
gloo          reason why an all-reduce of two processes over the loopback interface failed; empty if it succeeded
sklearn       version of scikit-learn; null if it is missing
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from pipeplan_launch.torch_check import version_problem

PATIENCE_S = 10.0


def torch_report() -> dict[str, Any]:
    """The report that is printed as one line of JSON."""
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
    from pipeplan_launch.elastic.local_workers import fork_worker, stay_on_loopback
    from pipeplan_launch.elastic.store import serve_store

    stay_on_loopback(os.environ)
    try:
        store = serve_store(timedelta(seconds=PATIENCE_S))
    except (OSError, RuntimeError) as error:
        return _one_line(error)
    other = fork_worker(lambda: _other_process(store.port), {})
    try:
        return _all_reduce(0, store.port)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)


def _other_process(port: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # both processes would print the same warnings
    _all_reduce(1, port)


def _all_reduce(rank: int, port: int) -> str:
    import torch
    import torch.distributed as dist

    from pipeplan_launch.elastic.store import open_store

    try:
        patience = timedelta(seconds=PATIENCE_S)
        dist.init_process_group("gloo", timeout=patience, world_size=2, rank=rank, store=open_store(port, patience))
        tensor = torch.full((4,), float(rank + 1))
        dist.all_reduce(tensor)
        dist.barrier()
        return "" if tensor.tolist() == [3.0] * 4 else f"1 + 2 came out as {tensor.tolist()[0]:g}"
    except Exception as error:  # torch may raise anything if the network does not work
        return _one_line(error)


def _one_line(error: Exception) -> str:
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
