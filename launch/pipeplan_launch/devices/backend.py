"""The executor's calls of torch that depend on the kind of device, with one class for each kind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.errors import LaunchError

# Physical cores: processors that are threads of one core count once, according to Linux's /sys.

SYSTEM = Path("/sys/devices/system/cpu")


def physical_cores(processors: set[int] | None = None, system: Path = SYSTEM) -> int:
    """Number of physical cores of these processors, by default this process's; the number of processors if unknown."""
    mine = os.sched_getaffinity(0) if processors is None else processors
    cores = set()
    for number in mine:
        try:
            siblings = (system / f"cpu{number}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        except (OSError, ValueError):
            siblings = str(number)
        cores.add(siblings.strip())
    return len(cores)


# Streams of a device in addition to the computing stream. Messages wait on them for their data.
#
# A mark is a point in the computing stream. An operation that is posted in `beside` starts after the given marks, and
# does not wait for later work of the computing stream. The host does not wait.


class Lane(IntEnum):
    """The streams other than the computing stream."""

    RECEIVES = 0
    SENDS = 1
    COLLECTIVES = 2


class Streams:
    """The streams of one worker's device. This class is for CPUs, which compute at once, so nothing waits."""

    def mark(self) -> Any:
        """A mark after all operations that were posted to the computing stream so far."""

    def beside(self, lane: Lane, *after: Any) -> AbstractContextManager[None]:
        """Context in which operations are posted to a lane. They start after these marks."""
        return nullcontext()


class CUDAStreams(Streams):
    """The streams of a CUDA device. The computing stream is the current stream outside of `beside`."""

    def __init__(self, device: torch.device) -> None:
        self._lanes: list[Any] = [torch.cuda.Stream(device) for _ in Lane]  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """An event in the current stream."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def beside(self, lane: Lane, *after: Any) -> Iterator[None]:
        """Context in which the lane's stream is the current stream, and waits for these events."""
        stream = self._lanes[lane]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield


class Backend:
    """Behaviour that depends on the kind of device. This class is for CPUs, which all workers of a machine share."""

    kind = "cpu"
    """torch's name for devices of this kind."""
    copies_to_host = False
    """Whether messages over Gloo are copied to and from the host's memory."""

    def cards(self) -> list[str]:
        """The UUID of each device that this process sees, as text; "" if torch does not provide it."""
        return []

    def names(self) -> list[str]:
        """torch's name of each device that this process sees."""
        return []

    def select(self, number: int) -> torch.device:
        """Make a device the current device of this process, and return it. `number` is taken modulo the number of
        visible devices. Raises `LaunchError` if there are none.
        """
        return torch.device("cpu")

    def process_groups(self, own_device_each: bool) -> str:
        """torch's name for the back ends of process groups. `own_device_each`: whether no workers share a device."""
        return "gloo"

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the host's memory, of the kind that is fastest to copy to and from the device."""
        return torch.empty(shape, dtype=dtype)

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
        """Context with a function that copies a tensor to the device, for operations that are posted afterwards."""
        yield lambda tensor: tensor.to(device)

    def synchronise(self, device: torch.device) -> None:
        """Wait until the device has finished all its work."""

    def streams(self, device: torch.device) -> Streams:
        """The streams of the device."""
        return Streams()

    def peak_bytes(self, device: torch.device) -> int | None:
        """Peak bytes of tensors on the device; None if the memory of the process must be measured instead."""
        return None

    def missing_compiler(self) -> str:
        """The compiler that torch.compile's inductor needs for the device, if it is missing; "" if it is there."""
        from torch._inductor import cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
        except Exception:  # torch's own classes for this error have moved between versions
            return "a C++ compiler for the CPU, and there is none here: install g++, name one in CXX"
        return ""

    def random_state(self, device: torch.device) -> Tensor | None:
        """State of the device's own random generator; None if the device uses the host's."""
        return None

    def set_random_state(self, state: Tensor | None, device: torch.device) -> None:
        """Set the device's random generator back to an earlier state."""


class CUDA(Backend):
    """NVIDIA GPUs, or parts of them (MIG), that CUDA_VISIBLE_DEVICES shows to this process."""

    kind, copies_to_host = "cuda", True
    _copies: Any = None
    """The stream of `copying`."""

    def cards(self) -> list[str]:
        """UUIDs of the visible devices."""
        devices = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
        return [str(getattr(device, "uuid", "")) for device in devices]

    def names(self) -> list[str]:
        """Names of the visible devices."""
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]

    def select(self, number: int) -> torch.device:
        """Make a device the current device, and return it. Raises `LaunchError` if torch finds none."""
        if not torch.cuda.is_available():
            raise LaunchError("the plan is for CUDA devices, and torch finds none on this machine")
        device = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def process_groups(self, own_device_each: bool) -> str:
        """NCCL for tensors on GPUs, unless workers share a GPU, which NCCL refuses."""
        return "cpu:gloo,cuda:nccl" if own_device_each else "gloo"

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
        """The function copies through pinned memory and in a stream of its own, so that nothing waits for earlier
        passes.
        """
        self._copies = self._copies or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copied: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            pinned = tensor.pin_memory() if _can_be_pinned(tensor) else tensor
            copied.append(pinned.to(device, non_blocking=True))
            return copied[-1]

        with torch.cuda.stream(self._copies):
            yield copy
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(self._copies)
        for one in copied:
            one.record_stream(computing)  # or a later copy could take its memory too early

    def synchronise(self, device: torch.device) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(device)

    def streams(self, device: torch.device) -> Streams:
        """CUDA streams."""
        return CUDAStreams(device)

    def peak_bytes(self, device: torch.device) -> int:
        """The allocator's peak."""
        return torch.cuda.max_memory_allocated(device)

    def missing_compiler(self) -> str:
        """Triton, if it is missing."""
        from torch.utils._triton import has_triton

        return "" if has_triton() else "triton for this GPU, which is missing: pip install triton"

    def random_state(self, device: torch.device) -> Tensor:
        """State of the device's generator."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, state: Tensor | None, device: torch.device) -> None:
        """Set the device's generator."""
        if state is not None:
            torch.cuda.set_rng_state(state, device)


def _can_be_pinned(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


_BACKENDS: dict[str, Backend] = {"cpu": Backend(), "cuda": CUDA()}


def backend_of(device: torch.device | str) -> Backend:
    """The backend of a device, or of a kind of device. Raises `LaunchError` for any kind except `cpu` and `cuda`."""
    kind = device if isinstance(device, str) else device.type
    if kind not in _BACKENDS:
        raise LaunchError(f"pipeplan does not run on devices of the kind {kind!r}, only on cpu and cuda")
    return _BACKENDS[kind]


def seed_generators(value: int) -> None:
    """Seed torch like torch.manual_seed, but without recording the call stack for each unused device."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def cuda_devices() -> int:
    """Number of CUDA devices that this process sees."""
    return torch.cuda.device_count()


def cuda_text() -> str:
    """The CUDA devices in words: `0 GPUs`, or `3 GPUs (2 × NVIDIA A100, 1 × Tesla T4)`."""
    names = Counter(CUDA().names())
    kinds = ", ".join(f"{count} × {name}" for name, count in names.items())
    return f"{cuda_devices()} GPUs" + (f" ({kinds})" if kinds else "")


def nccl_version() -> str | None:
    """Version of NCCL that torch was built with; None for none."""
    if not dist.is_available() or not dist.is_nccl_available():
        return None
    version: Any = torch.cuda.nccl.version  # torch has no type annotations for it
    return ".".join(str(number) for number in version())
