"""The rows of Table 1 in Narayanan et al., PipeDream, SOSP 2019. Minibatch sizes are from the authors' scripts."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, Table 1"


@dataclass(frozen=True)
class PublishedRow:
    """One row: a model on a cluster, the paper's configuration, and its speed-up over data parallelism."""

    model: str
    profile: str
    """Name of the model's profile, both the published and the bundled one."""
    minibatch: int
    """Samples per GPU."""
    servers: int
    gpus_per_server: int
    cluster: str
    config: str
    """Replica counts from input to output, or `straight`, as the paper writes it."""
    speedup: float
    """Of an epoch, over data parallelism."""
    to_accuracy: float | None
    """Speed-up in the time to the target accuracy; None where the paper has none."""

    @property
    def name(self) -> str:
        """The row's name on the command line: `vgg16-4x4`."""
        return f"{self.profile}-{self.shape}"

    @property
    def shape(self) -> str:
        """Servers and GPUs per server, as the paper writes them: `4x4`."""
        return f"{self.servers}x{self.gpus_per_server}"

    @property
    def workers(self) -> int:
        """Number of GPUs."""
        return self.servers * self.gpus_per_server

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of every stage; `straight` has one stage per worker."""
        if self.config == "straight":
            return (1,) * self.workers
        return tuple(int(count) for count in self.config.split("-"))

    @property
    def data_parallel(self) -> bool:
        """Whether the paper's configuration is data parallelism itself. Its speed-up is then 1.0 by definition."""
        return len(self.replicas) == 1


ROWS = (
    PublishedRow("VGG-16", "vgg16", 64, 4, 4, "A", "15-1", 5.28, 5.28),
    PublishedRow("VGG-16", "vgg16", 64, 2, 8, "B", "15-1", 2.98, 2.46),
    PublishedRow("ResNet-50", "resnet50", 128, 4, 4, "A", "16", 1.0, 1.0),
    PublishedRow("ResNet-50", "resnet50", 128, 2, 8, "B", "16", 1.0, 1.0),
    PublishedRow("AlexNet", "alexnet", 256, 4, 4, "A", "15-1", 4.92, None),
    PublishedRow("AlexNet", "alexnet", 256, 2, 8, "B", "15-1", 2.04, None),
    PublishedRow("GNMT-16", "gnmt16", 64, 1, 4, "A", "straight", 1.46, 2.2),
    PublishedRow("GNMT-16", "gnmt16", 64, 4, 4, "A", "straight", 2.34, 2.92),
    PublishedRow("GNMT-16", "gnmt16", 64, 2, 8, "B", "straight", 3.14, 3.14),
    PublishedRow("GNMT-8", "gnmt8", 64, 1, 4, "A", "straight", 1.5, 1.5),
    PublishedRow("GNMT-8", "gnmt8", 64, 3, 4, "A", "straight", 2.95, 2.95),
    PublishedRow("GNMT-8", "gnmt8", 64, 2, 8, "B", "16", 1.0, 1.0),
    PublishedRow("AWD-LM", "awd-lm", 80, 1, 4, "A", "straight", 4.25, 4.25),
    PublishedRow("S2VT", "s2vt", 80, 4, 1, "C", "2-1-1", 3.01, 3.01),
)

FITTED = {"A": "vgg16-4x4", "B": "vgg16-2x8"}
"""By cluster, the row whose published speed-up the rate of its all-reduces is fitted to."""


def row_named(name: str) -> PublishedRow | None:
    """The row of a name; None where there is none."""
    return next((row for row in ROWS if row.name == name), None)
