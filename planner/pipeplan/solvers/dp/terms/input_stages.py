"""The assumptions of searches under vertical sync about input stages beyond one with known replicas and depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeplan.problem.cuts import Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.terms.cost_terms import CostTerms, InputStage


@dataclass(frozen=True)
class AnyInputStage(InputStage):
    """A bound on the weight versions that input stages ask for, in pipelines with several stages: one replica and
    `delay`, while the input stage of the pipeline may have any number of replicas.

    An input stage with r_1 replicas asks a stage with r for 1 + ceil(((d_1 + lag_1) r_1 - gcd(r_1, r)) / r) versions.
    As the gcd is at most r_1, and the lag 1 unless r_1 is the only replica, that is no fewer than with one replica and
    the delay d_1 r_1 + 1, or d_1 for a single replica.
    """

    @staticmethod
    def delays(copies: int, depth: Ints, replicas: Ints) -> Ints:
        """The delays of input stages."""
        return depth * replicas + (replicas * copies > 1)

    def delay_with(self, replicas: int, copies: int) -> int:
        """Depth and lag, together, that an input stage with so many replicas has at least, where this bound holds."""
        late = int(replicas * copies > 1)
        return math.ceil((self.delay - late) / replicas) + late

    @staticmethod
    def of(copies: int, depth: int, replicas: int) -> AnyInputStage:
        """The bound that input stages set whose delay is no smaller than that of this one."""
        return AnyInputStage(1, int(AnyInputStage.delays(copies, np.array(depth), np.array(replicas))))

    @staticmethod
    def within(terms: CostTerms, pace_s: float) -> AnyInputStage:
        """The bound for all pipelines with at most this pace, in seconds per minibatch of one copy.

        They have N = work / (speed · pace) workers at least. As d r of a stage covers all workers from it on, d_1 r_1
        is no less than N.
        """
        return AnyInputStage(1, _busy_workers(terms, pace_s) + (terms.problem.copies > 1))

    @staticmethod
    def least_delay(terms: CostTerms, pace_s: float, replicas: int) -> int:
        """Depth and lag, together, that an input stage with so many replicas has at least.

        A stage that is the only one has no lag, and depth 1.
        """
        return math.ceil(_busy_workers(terms, pace_s) / replicas)


def _busy_workers(terms: CostTerms, pace_s: float) -> int:
    """The least workers that a pipeline within a pace needs for its work."""
    return max(1, math.ceil(terms.problem.work_s / (terms.fastest * pace_s * (1 + SLACK)) - 1e-9))
