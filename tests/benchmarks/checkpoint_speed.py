"""How long a checkpoint takes, beside the disk's own time for as many bytes.

    PYTHONPATH=tests/support python tests/benchmarks/checkpoint_speed.py [--folder DIR] [--parameters 20] [--repeats 5]

A transformer's tensors (default: 20 million parameters) with AdamW's two moments, in float32, are written and read as
a run does: by one worker, and by two replicas of a stage, which share the work. `plain` writes the same bytes into one
file, with an fsync. In a folder in memory (/dev/shm) there is no disk, and what is left is the executor's own time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def tensors_of(millions: float) -> dict[str, Any]:
    """Parameters and moments, by the names of a checkpoint."""
    import torch

    width, layers = 384, 0
    shapes = {"embedding": (8000, width)}
    while sum(a * b for a, b in shapes.values()) < millions * 1e6:
        for name, shape in (("qkv", (3 * width, width)), ("out", (width, width)), ("up", (4 * width, width))):
            shapes[f"{layers}.{name}"] = shape
            shapes[f"{layers}.{name}.bias"] = (1, shape[0])
        shapes[f"{layers}.down"], shapes[f"{layers}.norm"] = (width, 4 * width), (2, width)
        layers += 1
    made = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        made |= {f"optim.state.{name}.{moment}": torch.randn(shape) for name, shape in shapes.items()}
    return made | {f"optim.state.{name}.step": torch.tensor(1.0) for name in shapes}


def work(rank: int, world: int, port: int, folder: Path, millions: float, repeats: int, results: Any) -> None:
    """Be one worker: write and read, `repeats` times; rank 0 hands back (seconds to write, seconds to read)."""
    import torch
    import torch.distributed as dist
    from saved import NOTHING

    from pipeplan_launch.checkpoint import checkpoint, tensor_store
    from pipeplan_launch.checkpoint.manifest import History, Manifest, Position

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    tensors, times = tensors_of(millions), []
    for number in range(repeats + 1):
        if rank == 0:
            checkpoint.begin_checkpoint(folder)
        dist.barrier()
        begun = time.perf_counter()
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        writers = tensor_store.choose_writers([sizes] * world)
        mine = {name: tensor for name, tensor in tensors.items() if writers[name] == rank}
        written = tensor_store.write_tensors(folder / checkpoint.PARTIAL_CHECKPOINT, mine, rank)
        parts: list[Any] = [None] * world
        dist.all_gather_object(parts, written)
        index = {name: one for part in parts for name, one in part.items()}
        if rank == 0:
            part = folder / checkpoint.PARTIAL_CHECKPOINT
            digests = tensor_store.write_index(part, index)
            files = {path.name: path.stat().st_size for path in part.iterdir()}
            at = Position(0, number, repeats + 1)
            manifest = Manifest(
                part, at, History(), 1, 1, 0, "plan", "ref", "hash", (("a",),), {}, NOTHING, index, files, digests
            )
            checkpoint.commit_checkpoint(folder, manifest)
        dist.barrier()
        saved = time.perf_counter()
        tensor_store.fill_tensors(checkpoint.find_checkpoint(folder), {name: tensors[name] for name in tensors})
        dist.barrier()
        times.append((saved - begun, time.perf_counter() - saved))
    if rank == 0:
        results.put([statistics.median(column) for column in zip(*times[1:], strict=True)])


def measure(world: int, folder: Path, millions: float, repeats: int) -> list[float]:
    """(seconds to write, seconds to read): medians, after one that does not count."""
    import torch

    context = multiprocessing.get_context("spawn")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    results = context.Queue()
    arguments = (world, store.port, folder, millions, repeats, results)
    workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world)]
    for worker in workers:
        worker.start()
    found: list[float] = results.get(timeout=110)
    for worker in workers:
        worker.join()
    return found


def plain(folder: Path, size: int, repeats: int) -> float:
    """Seconds to write so many bytes into one file, and to have them on disk."""
    block, times = os.urandom(2**20), []
    for _ in range(repeats):
        begun = time.perf_counter()
        with (folder / "plain").open("wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        times.append(time.perf_counter() - begun)
    (folder / "plain").unlink()
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, action="append")
    parser.add_argument("--parameters", type=float, default=20, metavar="MILLIONS")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    size = sum(one.numel() * one.element_size() for one in tensors_of(given.parameters).values())
    print(f"{given.parameters:g} million parameters with AdamW: {size / 2**20:.0f} MiB; seconds, medians")
    print(f"{'folder':>12}  {'plain':>7}  {'workers':>7}  {'write':>7}  {'read':>7}")
    for folder in given.folder or [Path(tempfile.gettempdir()), Path("/dev/shm")]:
        place = Path(tempfile.mkdtemp(dir=folder))
        try:
            disk = plain(place, size, given.repeats)
            for world in (1, 2):
                write, read = measure(world, place / str(world), given.parameters, given.repeats)
                print(f"{folder!s:>12}  {disk:7.3f}  {world:7d}  {write:7.3f}  {read:7.3f}", flush=True)
        finally:
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
