"""The settings of a solve: the solvers to run, the searches beside them, and the division of the time."""

from __future__ import annotations

from dataclasses import dataclass

MAXIMUM_CUTS = 50_000
"""For a graph with more cuts the DP searches a selection of them; the ILP still sees the whole graph."""

SHARES = {
    "choice": 0.5,
    "cuts": 0.5,
    "first": 0.5,
    "last": 0.8,
    "certificate": 0.5,
    "grid": 0.4,
    "baselines": 0.8,
    "simplest": 0.5,
    "simulation": 1.0,
    "diagnosis": 1.0,
}
"""The share of the time left that each phase may take: the choice of a schedule, a minibatch size or a number of
workers, the cuts, the first of two solvers, the last or only solver, the certificate, data parallelism and the best
uniform grid, the straight pipeline, the search for a simpler plan, the simulation. Where there is no plan, the
diagnosis takes what the solvers leave. What a phase does not need is left to those after it."""


@dataclass(frozen=True)
class Settings:
    """The solvers to run and their limits."""

    solver: str = "both"
    """`dp`, `ilp` or `both`."""
    backend: str = "highs"
    """The solver of the integer program: `highs` or `cbc`."""
    time_limit_s: float | None = 60.0
    """Seconds for everything, from the cuts to the baselines; None for no limit. docs/cost-model.md divides them."""
    confirm_s: float | None = 4.0
    """Seconds for the ILP to confirm a plan that the DP has proven optimal; None for what the time limit leaves."""
    gap: float = 0.0
    """Relative gap at which a solver may stop before it has proven its plan optimal."""
    maximum_cuts: int = MAXIMUM_CUTS
    certify: bool = True
    """Whether to record a certificate that `pipeplan check` can verify."""
    simulate: bool = True
    """Whether to simulate the plan, plans nearly as fast and the baselines, and to choose and compare by what is stated
    then."""
    simplest: float = 0.0
    """The share of the fastest plan's pace by which the simplest plan, which is taken, may be slower; 0 takes the
    fastest plan. The commands have `simplest.WITHIN`."""
    compare: bool = True
    """Whether to search for baselines where the plan is proven optimal by the formulas: the best straight pipeline, the
    best uniform grid, data parallelism on fewer workers. They are shown, and one is taken if it is faster in the
    simulation. Their searches may take longer than the plan's own."""
    jobs: int = 1
    """The most processes, this one included. Others search for baselines beside the solvers, if a search is long enough
    to start an interpreter for; a script needs its own code under `if __name__ == "__main__":` then. What is found does
    not depend on it, but where the time limit comes first."""
