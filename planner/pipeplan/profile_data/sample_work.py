"""The size of a training sample: its FLOPs, its tokens, and how many samples an epoch has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeplan.util.numeric_fields import settle_numbers
from pipeplan.util.typed import Amount, Natural


@dataclass(frozen=True)
class SampleFlops:
    """FLOPs of one kind of operator for one sample, two for each multiply-add, without any recomputation."""

    kind: str
    """One of `pipeplan.cluster_data.device_document.OPERATOR_KINDS`."""
    arithmetic: str
    """The type that the operator computes in, one of `pipeplan.cluster_data.device_document.ARITHMETICS`."""
    forward: Amount
    backward: Amount

    def __post_init__(self) -> None:
        settle_numbers(self)


@dataclass(frozen=True)
class SampleWork:
    """The work of one sample, and the size of an epoch; what is not known is left at its default."""

    flops: tuple[SampleFlops, ...] = ()
    """Empty where they were not counted, or some layers are opaque so that their FLOPs are not known."""
    tokens_per_sample: Natural = 0
    """Tokens in a sample, as the job states them; 0 where it does not."""
    dataset_size: Natural = 0
    """Training samples in an epoch of the job's data; 0 where the job has no data."""

    def to_json(self) -> dict[str, Any]:
        """The object that a profile holds under `work`."""
        return asdict(self) | {"flops": [asdict(one) for one in self.flops]}
