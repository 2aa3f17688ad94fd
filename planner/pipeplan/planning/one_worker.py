"""One worker that has a machine to itself, beside the best plan whose workers share its processors.

Workers of one machine slow each other down, so a profile with times under load charges a plan the times of as many busy
workers as the cluster has. A worker without company is faster than that. Which times count has to be known before a
search, so the plan of one worker is a problem of its own, and the faster of the two answers is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.util.units import show_pace


@dataclass(frozen=True)
class OneWorkerChoice:
    """A sentence that says that one worker was taken, and in whose place."""

    workers: int
    """Workers of the cluster that was asked for."""
    alone_sample_s: float
    """Seconds per sample of one worker."""
    best_sample_s: float
    """Seconds per sample of the best plan for all workers."""

    @property
    def text(self) -> str:
        """One sentence for people."""
        return (
            f"one worker, which has the processors to itself, makes {show_pace(1 / self.alone_sample_s)} samples/s, "
            f"and the best plan for {self.workers} workers {show_pace(1 / self.best_sample_s)}: the plan is for one "
            "worker"
        )
