"""The options of the command line for averaging gradients among the replicas of a stage. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import SHARDED, LaunchPlan

_COMPRESSION = re.compile(r"bf16|powersgd(?::([1-9]\d{0,3})(?::(\d{1,9}))?)?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")
EXACT_UPDATES = 10  # torch recommends a tenth of all updates, and requires 2


@dataclass(frozen=True)
class Compression:
    """Compression of gradients among all replicas of a stage, by one of torch's own communication hooks."""

    kind: str
    """`bf16` or `powersgd`."""
    rank: int = 1
    """PowerSGD: rank of the two thin matrices that stand for a parameter's gradient."""
    exact: int = EXACT_UPDATES
    """PowerSGD: number of the job's first updates that are averaged exactly."""


@dataclass(frozen=True)
class GradientAveraging:
    """Options for what the replicas of a stage do together: the exact mean of gradients, unless a field is set."""

    compression: Compression | None = None
    significance: float | None = None
    """Only updates above this share of their weight leave a server; smaller ones accumulate until they exceed it."""
    shards_optimizer: bool | None = None
    """Whether each replica keeps and computes only its part of the optimiser's state and step; None: as the plan says,
    or not without one."""

    def by_default_of(self, plan: LaunchPlan) -> GradientAveraging:
        """These options, with the plan's choice of dividing the optimiser where the user made none."""
        return self if self.shards_optimizer is not None else replace(self, shards_optimizer=plan.shard_optimizer)

    @property
    def plain(self) -> bool:
        """Whether replicas average gradients exactly, and each makes the whole step."""
        return not self.shards_optimizer and self.compression is None and self.significance is None


EXACT_AVERAGING = GradientAveraging()


def check_averaging_options(
    averaging: GradientAveraging, plan: LaunchPlan | None = None, compile_backend: str | None = None
) -> None:
    """Raise `LaunchError` for options that exclude each other, or that FSDP excludes, if the plan runs under it."""
    given = {
        "--compress": averaging.compression,
        "--significance": averaging.significance,
        "--shard-optimizer": averaging.shards_optimizer,
        "--compile": compile_backend,
    }
    if plan is not None and plan.data_parallel in SHARDED and (name := next((n for n in given if given[n]), None)):
        raise LaunchError(
            f"{name} is for workers that hold all weights of a stage, and under this plan ({plan.data_parallel}) each "
            f"holds a part: leave it out, or solve for a plan without FSDP"
        )
    if averaging.shards_optimizer and averaging.significance is not None:
        raise LaunchError(
            "--significance needs the optimiser's state of every weight, and with --shard-optimizer a replica has only "
            "a part of it: leave one of them out"
        )


def parse_compression(text: str) -> Compression:
    """Parse `bf16`, `powersgd`, `powersgd:RANK` or `powersgd:RANK:EXACT`. Raises `ValueError`."""
    match = _COMPRESSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is neither bf16 nor powersgd, powersgd:RANK or powersgd:RANK:EXACT_UPDATES")
    if text == "bf16":
        return Compression("bf16")
    rank, exact = match.groups()
    return Compression("powersgd", int(rank or 1), EXACT_UPDATES if exact is None else int(exact))


def parse_significance(text: str) -> float:
    """Parse a share such as `1%` or `0.01`, at least 0 and below 100%. Raises `ValueError`."""
    match = _PERCENT.fullmatch(text.strip())
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share < 1:
        raise ValueError(f"{text[:40]!r} is not a share from 0% to below 100%, as in 1% or 0.01")
    return share
