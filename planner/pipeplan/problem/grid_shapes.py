"""Uniform grids: S stages with r replicas each, where stage s is on workers s·r … s·r + r - 1.

Trainers with a pipeline-parallel and a data-parallel size (Megatron-LM, DeepSpeed, torchtitan) run such grids. The S·r
workers are the whole cluster, or whole servers from the first one on, or any number of workers inside the first server.
If all stages share one update, every replica takes the same number of the update's minibatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem


@dataclass(frozen=True)
class GridShape:
    """The number of stages and the number of replicas of each stage."""

    stages: int
    replicas: int

    @property
    def workers(self) -> int:
        """Number of busy workers."""
        return self.stages * self.replicas

    @property
    def text(self) -> str:
        """The shape as text, stages times replicas, such as `4×4`."""
        return f"{self.stages}×{self.replicas}"


def grid_sizes(cluster: Cluster) -> list[int]:
    """The numbers of workers that a grid may have, ascending: up to one server, or whole servers."""
    edges = list(cluster.starts(cluster.server_level))[1:]
    return [*range(1, edges[0]), *edges]


def grid_shapes(problem: Problem) -> list[GridShape]:
    """The shapes that the options allow, by decreasing number of workers."""
    shapes = [
        GridShape(stages, workers // stages)
        for workers in reversed(grid_sizes(problem.cluster))
        for stages in range(1, min(workers, len(problem.units)) + 1)
        if workers % stages == 0
    ]
    return [shape for shape in shapes if _allowed(shape, problem)]


def _allowed(shape: GridShape, problem: Problem) -> bool:
    """Whether the options allow a shape."""
    options = problem.options
    return (
        options.stages in (None, shape.stages)
        and shape.stages <= min(len(problem.units), options.max_stages or shape.stages)
        and shape.replicas <= (options.max_replicas or shape.replicas)
        and shape.workers <= (options.max_workers or shape.workers)
        and all(stage <= shape.stages for _, stage in options.pins)
        and _shares(options) % shape.replicas == 0
    )


def _shares(options: Options) -> int:
    """Number of minibatches of an update that replicas divide among them; 0 if every stage updates by itself."""
    return 0 if options.inference or options.schedule not in ACCUMULATING else options.accumulate or 0


def data_parallel_grid_size(problem: Problem, most: int) -> int:
    """The most workers, up to `most`, on which plain data parallelism is a grid.

    Raises `ValueError` if `most` is less than 1.
    """
    sizes = [size for size in grid_sizes(problem.cluster) if size <= most and _shares(problem.options) % size == 0]
    return max(sizes)
