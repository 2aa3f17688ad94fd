"""What the searches under vertical sync assume about input stages beyond one with known replicas and depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.stage_costs import CostTerms, InputStage


@dataclass(frozen=True)
class AnyInputStage(InputStage):
    """An input stage that asks every stage for no more weight versions than any real one: that of any pipeline with
    several stages within a pace. The input stage of the pipeline may have any number of replicas.

    Such a pipeline has N = work / (speed · pace) workers at least, and d r of a stage covers all workers from it on, so
    d_1 r_1 ≥ N. With a late update (d_1 + 1) r_1 - gcd(r_1, r) ≥ N; without one r_1 is 1, and d_1 - 1 ≥ N - 1.
    """

    @staticmethod
    def within(terms: CostTerms, pace_s: float) -> AnyInputStage:
        """The input stage for pipelines with at most this pace, in seconds per minibatch of one copy."""
        busy = math.ceil(terms.problem.work_s / (terms.fastest * pace_s * (1 + SLACK)) - 1e-9)
        return AnyInputStage(1, max(1, busy) + (terms.problem.copies > 1))

    @staticmethod
    def least_delay(terms: CostTerms, pace_s: float, replicas: int) -> int:
        """Depth and lag, together, that an input stage with so many replicas has at least."""
        busy = AnyInputStage.within(terms, pace_s).delay - (terms.problem.copies > 1)
        # A stage that is the only one has no lag, and depth 1 on any number of replicas.
        return max(1, math.ceil(busy / replicas))
