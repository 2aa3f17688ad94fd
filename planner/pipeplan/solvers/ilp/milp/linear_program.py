"""Variables and constraints of the integer program, a thin layer over PuLP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

import pulp

from pipeplan.util.deadline import NO_DEADLINE, Deadline

THOUSANDTHS = 1000.0
"""HiGHS drops coefficients below 1e-9, which would falsify a sum over all layers. So such sums are in thousandths of
the whole, and amounts that are negligible even then are left out everywhere."""
NEGLIGIBLE = 1e-8

_OWNS_VARIABLES = hasattr(pulp.LpAffineExpression, "from_dict")
"""Whether programs own their variables, as from PuLP 4 on."""

Variable = pulp.LpVariable
Term = tuple[Variable, float]


class LinearProgram:
    """A minimisation. If terms name a variable twice, their coefficients are added.

    Adding a constraint raises `OutOfTime` after the deadline: large programs take a minute to build.
    """

    def __init__(self, deadline: Deadline = NO_DEADLINE) -> None:
        self.lp = pulp.LpProblem("pipeplan", pulp.LpMinimize)
        self._deadline = deadline
        self.one = self.number("one", 1.0, 1.0)
        """Always 1, for constant terms."""

    def minimise(self, terms: Iterable[Term]) -> None:
        """Set the objective."""
        self.lp.setObjective(_expression(terms))

    def number(self, name: str, low: float = 0.0, high: float | None = None) -> Variable:
        """A new continuous variable, not negative unless `low` says so."""
        return new_variable(self.lp, name, low, high)

    def binary(self, name: str) -> Variable:
        """A new 0/1 variable."""
        return new_variable(self.lp, name, 0, 1, pulp.LpInteger)

    def at_most(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """Add Σ coefficient · variable ≤ limit."""
        self._add(_expression(terms) <= limit)

    def at_least(self, terms: Iterable[Term], limit: float = 0.0) -> None:
        """Add Σ coefficient · variable ≥ limit."""
        self._add(_expression(terms) >= limit)

    def equal(self, terms: Iterable[Term], value: float = 0.0) -> None:
        """Add Σ coefficient · variable = value."""
        self._add(_expression(terms) == value)

    def _add(self, constraint: Any) -> None:
        self._deadline.check()
        self.lp.addConstraint(constraint)

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


def new_variable(
    program: pulp.LpProblem, name: str, low: float | None = None, high: float | None = None, kind: str = "Continuous"
) -> Variable:
    """A new variable of a program, by the interface that this version of PuLP has."""
    if _OWNS_VARIABLES:
        return program.add_variable(name, low, high, kind)
    return pulp.LpVariable(name, low, high, kind)


def _expression(terms: Iterable[Term]) -> Any:
    merged, kind = _merged(terms), cast(Any, pulp.LpAffineExpression)
    return kind.from_dict(merged) if _OWNS_VARIABLES else kind(merged)


def _merged(terms: Iterable[Term]) -> dict[Variable, float]:
    merged: dict[Variable, float] = defaultdict(float)
    for variable, coefficient in terms:
        merged[variable] += coefficient
    return {variable: coefficient for variable, coefficient in merged.items() if coefficient}
