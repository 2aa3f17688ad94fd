"""Variables and constraints of the integer program, a thin layer over PuLP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pulp

THOUSANDTHS = 1000.0
"""HiGHS drops coefficients below 1e-9, which would falsify a sum over all layers. So such sums are in thousandths of
the whole, and amounts that are negligible even then are left out everywhere."""
NEGLIGIBLE = 1e-8

Variable = pulp.LpVariable
Term = tuple[Variable, float]


class LinearProgram:
    """A minimisation. If terms name a variable twice, their coefficients are added."""

    def __init__(self) -> None:
        self.lp = pulp.LpProblem("pipeplan", pulp.LpMinimize)
        self.one = self.number("one", 1.0, 1.0)
        """Always 1, for constant terms."""

    def minimise(self, terms: Iterable[Term]) -> None:
        """Set the objective."""
        self.lp.setObjective(pulp.LpAffineExpression(_merged(terms)))

    def number(self, name: str, low: float = 0.0, high: float | None = None) -> Variable:
        """A new continuous variable, not negative unless `low` says so."""
        return pulp.LpVariable(name, low, high)

    def binary(self, name: str) -> Variable:
        """A new 0/1 variable."""
        return pulp.LpVariable(name, 0, 1, pulp.LpInteger)

    def at_most(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """Add Σ coefficient · variable ≤ limit."""
        self._add(terms, pulp.LpConstraintLE, limit)

    def at_least(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """Add Σ coefficient · variable ≥ limit."""
        self._add(terms, pulp.LpConstraintGE, limit)

    def equal(self, terms: Iterable[Term], value: float = 0.0) -> None:
        """Add Σ coefficient · variable = value."""
        self._add(terms, pulp.LpConstraintEQ, value)

    def _add(self, terms: Iterable[Term], sense: int, limit: float) -> None:
        self.lp += pulp.LpConstraint(pulp.LpAffineExpression(_merged(terms)), sense, None, limit)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of variables and of constraints."""
        return self.lp.numVariables(), self.lp.numConstraints()


def scale_terms(terms: Iterable[Term], factor: float) -> list[Term]:
    """The terms times a number."""
    return [(variable, factor * coefficient) for variable, coefficient in terms]


def negate_terms(terms: Iterable[Term]) -> list[Term]:
    """The terms with the opposite sign, to move them to the other side."""
    return scale_terms(terms, -1.0)


def solution_value(variable: Variable) -> float:
    """The value of a variable in the solution. The program must have been solved."""
    value: float | None = variable.varValue
    assert value is not None, "the program has not been solved"
    return value


def _merged(terms: Iterable[Term]) -> dict[Variable, float]:
    merged: dict[Variable, float] = defaultdict(float)
    for variable, coefficient in terms:
        merged[variable] += coefficient
    return {variable: coefficient for variable, coefficient in merged.items() if coefficient}
