"""torch.compile of the functions of a stage (`--compile`). The results of compiled functions may differ in their last
bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.user_code import describe_error

INDUCTOR = "inductor"


def check_compiler(backend: str, device: torch.device) -> None:
    """Raise `LaunchError` if torch.compile has no such backend here, or if it lacks the compiler that it needs."""
    from torch._dynamo.backends.registry import lookup_backend

    try:
        lookup_backend(backend)
    except Exception as error:  # torch's class for this error has moved between versions
        known = ", ".join(torch.compiler.list_backends())
        raise LaunchError(f"--compile-backend: torch.compile has no backend {backend!r} here, only {known}") from error
    if backend == INDUCTOR and (missing := backend_of(device).missing_compiler()):
        raise LaunchError(f"--compile needs {missing}, or leave it out")


def compiled_function(run: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A function that is compiled at the first call with each shape of its arguments.

    It raises `LaunchError` if torch.compile fails.
    """
    from torch._dynamo.exc import TorchDynamoException

    if backend == INDUCTOR and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config

        # Workers share a machine's cores, and a pool of processes would outlive a worker that is killed.
        config.compile_threads = 1
    # A run has few shapes: whole minibatches, and the last one of an epoch. Each shape is compiled separately.
    compiled = torch.compile(run, backend=backend, dynamic=False)

    def call(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except TorchDynamoException as error:
            raise LaunchError(
                f"torch.compile fails on this stage ({describe_error(error)}): leave out --compile"
            ) from error

    return call
