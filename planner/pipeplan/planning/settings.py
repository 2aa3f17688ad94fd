"""The settings of a solve: the solvers to run, the searches beside them, and the division of the time."""

from __future__ import annotations

from dataclasses import dataclass

MAXIMUM_CUTS = 50_000
"""For a graph with more cuts the DP searches a selection of them; the ILP still sees the whole graph."""

SHARES = {
    "choice": 0.7,
    "cuts": 0.5,
    "first": 0.5,
    "last": 0.8,
    "certificate": 0.5,
    "baselines": 0.4,
    "simulation": 1.0,
    "diagnosis": 1.0,
}
"""The share of the time left that each phase may take: the choice of a schedule and a microbatch size, the cuts, the
first of two solvers, the last or only solver, the certificate, the best uniform pipeline, the simulation. Where there
is no plan, the diagnosis takes what the solvers leave. What a phase does not need is left to those after it."""


@dataclass(frozen=True)
class Settings:
    """The solvers to run and their limits."""

    solver: str = "both"
    """`dp`, `ilp` or `both`."""
    backend: str = "highs"
    """The solver of the integer program: `highs` or `cbc`."""
    time_limit_s: float | None = 60.0
    """Seconds for everything, from the cuts to the baselines; None for no limit. docs/proof.md divides them."""
    confirm_s: float | None = 4.0
    """Seconds for the ILP to confirm a plan that the DP has proven optimal; None for what the time limit leaves."""
    gap: float = 0.0
    """Relative gap at which a solver may stop before it has proven its plan optimal."""
    maximum_cuts: int = MAXIMUM_CUTS
    certify: bool = True
    """Whether to record a certificate that `pipeplan check` can verify."""
    simulate: bool = True
    """Whether the figure of a plan is its simulated time; otherwise plans are compared by the formulas."""
    simplify: bool = False
    """Whether to take the simplest plan within the tolerance of the fastest (`simplicity.py`), as the commands do."""
    compare: bool = True
    """Whether to search for the best uniform pipeline where the plan is proven optimal by the formulas. It is shown,
    and taken if its figure is better. The search may take longer than the plan's own."""
