"""Rows and columns: what the integer program is written with, over PuLP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pulp

THOUSANDTHS = 1000.0
"""HiGHS drops coefficients below 1e-9, and a sum over all layers is then not what it is taken to be. So what is summed
up is in thousandths of the whole, and what is negligible even then is left out everywhere."""
NEGLIGIBLE = 1e-8

Variable = pulp.LpVariable
Term = tuple[Variable, float]


class Program:
    """A minimisation. Terms that name a variable twice are added up."""

    def __init__(self) -> None:
        self.lp = pulp.LpProblem("pipeplan", pulp.LpMinimize)
        self.one = self.number("one", 1.0, 1.0)
        """Always 1, for what is known beforehand."""

    def minimise(self, terms: Iterable[Term]) -> None:
        """Set the objective."""
        self.lp.setObjective(pulp.LpAffineExpression(_merged(terms)))

    def number(self, name: str, low: float = 0.0, high: float | None = None) -> Variable:
        """A new continuous variable, from 0 unless told."""
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
        """Variables and rows."""
        return self.lp.numVariables(), self.lp.numConstraints()


def scaled(terms: Iterable[Term], factor: float) -> list[Term]:
    """The terms times a number."""
    return [(variable, factor * coefficient) for variable, coefficient in terms]


def minus(terms: Iterable[Term]) -> list[Term]:
    """The terms with the other sign, to bring them to the other side."""
    return scaled(terms, -1.0)


def value(variable: Variable) -> float:
    """The value of a variable of a solved program."""
    found: float | None = variable.varValue
    assert found is not None, "the program has not been solved"
    return found


def _merged(terms: Iterable[Term]) -> dict[Variable, float]:
    merged: dict[Variable, float] = defaultdict(float)
    for variable, coefficient in terms:
        merged[variable] += coefficient
    return {variable: coefficient for variable, coefficient in merged.items() if coefficient}
