"""What was published: Table 1 of Narayanan et al., PipeDream, SOSP 2019, and what its authors' scripts add to it."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, Table 1"
SCRIPTS = "github.com/msr-fiddle/pipedream, runtime/*/driver_configs and runtime/*/models"


@dataclass(frozen=True)
class Published:
    """One row: a model on a cluster, the paper's configuration, and what it gained over data parallelism."""

    model: str
    profile: str
    """By this name a profile is looked for, published and bundled."""
    minibatch: int
    """Samples on each GPU."""
    servers: int
    each: int
    """GPUs in a server."""
    cluster: str
    config: str
    """As the paper writes it."""
    speedup: float
    """In the time of an epoch, over data parallelism."""
    to_accuracy: float | None
    """In the time to the target accuracy; None where the paper has none."""

    @property
    def name(self) -> str:
        """How the row is called on the command line: `vgg16-4x4`."""
        return f"{self.profile}-{self.shape}"

    @property
    def shape(self) -> str:
        """Servers and GPUs in each, as the paper writes them."""
        return f"{self.servers}x{self.each}"

    @property
    def workers(self) -> int:
        """GPUs in all."""
        return self.servers * self.each

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of every stage; `straight` has one stage a worker."""
        if self.config == "straight":
            return (1,) * self.workers
        return tuple(int(count) for count in self.config.split("-"))

    @property
    def parallel(self) -> bool:
        """Whether the paper's configuration is data parallelism itself: then 1.0 says nothing of a pipeline."""
        return len(self.replicas) == 1


ROWS = (
    Published("VGG-16", "vgg16", 64, 4, 4, "A", "15-1", 5.28, 5.28),
    Published("VGG-16", "vgg16", 64, 2, 8, "B", "15-1", 2.98, 2.46),
    Published("ResNet-50", "resnet50", 128, 4, 4, "A", "16", 1.0, 1.0),
    Published("ResNet-50", "resnet50", 128, 2, 8, "B", "16", 1.0, 1.0),
    Published("AlexNet", "alexnet", 256, 4, 4, "A", "15-1", 4.92, None),
    Published("AlexNet", "alexnet", 256, 2, 8, "B", "15-1", 2.04, None),
    Published("GNMT-16", "gnmt16", 64, 1, 4, "A", "straight", 1.46, 2.2),
    Published("GNMT-16", "gnmt16", 64, 4, 4, "A", "straight", 2.34, 2.92),
    Published("GNMT-16", "gnmt16", 64, 2, 8, "B", "straight", 3.14, 3.14),
    Published("GNMT-8", "gnmt8", 64, 1, 4, "A", "straight", 1.5, 1.5),
    Published("GNMT-8", "gnmt8", 64, 3, 4, "A", "straight", 2.95, 2.95),
    Published("GNMT-8", "gnmt8", 64, 2, 8, "B", "16", 1.0, 1.0),
    Published("AWD-LM", "awd-lm", 80, 1, 4, "A", "straight", 4.25, 4.25),
    Published("S2VT", "s2vt", 80, 4, 1, "C", "2-1-1", 3.01, 3.01),
)

FITTED = {"A": "vgg16-4x4", "B": "vgg16-2x8"}
"""By cluster, the row whose published speed-up its all-reduce is fitted to."""


def row_of(name: str) -> Published | None:
    """The row of that name."""
    return next((row for row in ROWS if row.name == name), None)
