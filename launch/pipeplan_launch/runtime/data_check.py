"""Checks that the job's data is the same at each reading.

Stages and replicas read their samples separately: the first stage reads inputs, and the last stage reads targets. Data
that depends on more than the index of a sample and the seeded generators would pair inputs with wrong targets, or train
replicas on other samples than the run has, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import TensorDataset

from pipeplan_launch.elastic.consistency_check import digest
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Data
from pipeplan_launch.job.seeds import mix_seed, seed_loading
from pipeplan_launch.runtime.data import Batches, MinibatchSizes, order_of_samples

REMEDY = (
    "it may depend on its index and on the global random generators of Python, NumPy and torch, which are seeded for "
    "every minibatch; seed any other generator by the index"
)
ORDER_REMEDY = "let it depend on the epoch alone, or on the global generators, which are seeded by the epoch"


def data_fingerprint(name: str, dataset: Any, seed: int, reader: int = 0) -> dict[str, str]:
    """The length of a data set, and digests of its first, middle and last sample, by description.

    Each sample is read three times: first with random numbers that only this `reader` has, so that readers of a data
    set that keeps what it read first differ, and then twice with those of the run. Raises `LaunchError` for samples or
    lengths that differ between readings, and any exception of the user's code.
    """
    count = len(dataset)
    marks = {f"the number of {name} samples": str(count)}
    for index in sorted({0, count // 2, count - 1}) if count else ():
        seed_loading(mix_seed("first reading", seed, reader), 0, index)
        dataset[index]
        description = f"{name} sample {index}"
        marks[description] = _read_twice(description, partial(_seeded_sample, dataset, seed, index))
    if len(dataset) != count:
        raise LaunchError(
            f"the {name} data has {count} samples at first and {len(dataset)} after some were read: its length must "
            "stay the same"
        )
    return marks


def minibatch_fingerprint(name: str, dataset: Any, sizes: MinibatchSizes, data: Data, seed: int) -> dict[str, str]:
    """Digest of the first minibatch as workers read it, by description; nothing for plain tensors.

    If other processes prefetch, one of them reads the minibatch too. Raises as `data_fingerprint` does.
    """
    if data.collate is None and type(dataset) is TensorDataset:
        return {}
    batches, description = Batches(dataset, sizes, seed, 0, data), f"minibatch 0 of the {name} data"
    mark = _read_twice(description, partial(_minibatch, batches))
    if data.processes:
        with batches.prefetch([0]):
            if _minibatch(batches) != mark:
                raise LaunchError(
                    f"{description} differs between a worker and the processes that prefetch for it: {REMEDY}"
                )
    return {description: mark}


def check_order(data: Data, seed: int) -> None:
    """Raise `LaunchError` if the user's own order of the samples is another one when it is asked for again."""
    if data.order is not None and order_of_samples(data, seed, 0) != order_of_samples(data, seed, 0):
        raise LaunchError(f"the data's `order` differs each time for epoch 0: {ORDER_REMEDY}")


def _seeded_sample(dataset: Any, seed: int, index: int) -> str:
    seed_loading(seed, 0, index)
    return digest(dataset[index])


def _minibatch(batches: Batches) -> str:
    batch = batches.load(0)
    return digest([batch.inputs, batch.target])


def _read_twice(description: str, read: Callable[[], str]) -> str:
    mark = read()
    if read() != mark:
        raise LaunchError(f"{description} differs at each reading: {REMEDY}")
    return mark
