"""Constraints (29) and (30) of the integer program: weight versions under vertical sync. `integer_program` has the
notation.

How many versions a stage keeps follows from its replicas and from the input stage (`schedules.vertical_versions`). For
an input stage on ρ with d minibatches in flight and a stage with r replicas, let a(ρ,d,r) be the versions beside the
first.

    q[ρ,d] ≥ 0       ρ holds the input stage, with depth d, and others follow; δ[ρ,d] where ρ starts at the first worker
    η[π,n] ∈ {0,1}   the stage on π has room for n versions beside the first
    k[π,n] ≥ 0       share of its parameters

(29) η[π,n] adds up to y[π], and over all n ≥ a it is at least y[π] - 1 + the sum of q[ρ,d] over a(ρ,d,r) ≥ a.
(30) k[π,n] ≤ memory/n · η[π,n], and the sum of n·k[π,n] counts for (11).
"""

from __future__ import annotations

from collections import defaultdict

from pipeplan.plan.schedules import update_lag, vertical_versions
from pipeplan.solvers.ilp.constraints.depth import DepthChoice, DepthConstraints
from pipeplan.solvers.ilp.constraints.placement_model import PlacementModel
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.solvers.ilp.milp.linear_program import Term


class VerticalVersions:
    """The versions of a model's stages beside the first, with (29)."""

    def __init__(self, model: PlacementModel, depths: DepthConstraints) -> None:
        self.model, self.depths = model, depths
        self._first = self._input_stages()
        self._kept: dict[Place, dict[int, Term]] = {}
        for place in model.at:
            self._keep(place)

    def _input_stages(self) -> list[tuple[DepthChoice, Term]]:
        """The terms of q, by the depth and the placement of the input stage."""
        model, found = self.model, []
        for placement in model.placements.all:
            if placement.start not in model.opening or model.placements.final(placement):
                continue
            for choice in self.depths.by_placement[placement]:
                chosen = self.depths.chosen[choice]
                if placement.start == 0:
                    found.append((choice, (chosen, 1.0)))
                    continue
                name = f"q_{placement.start}_{placement.replicas}_{placement.end}_{choice.depth}_{choice.recompute}"
                first = model.program.number(name, 0, 1)
                opening = (model.opening[placement.start], 1.0)
                model.program.at_most([(chosen, 1.0), opening, (first, -1.0)], 1.0)
                found.append((choice, (first, 1.0)))
        return found

    def _older(self, choice: DepthChoice, replicas: int) -> int:
        """Versions beside the first that stages with so many replicas keep behind an input stage."""
        first = choice.placement.replicas
        delay = choice.depth + int(update_lag(first * self.model.problem.copies, False))
        return int(vertical_versions(delay, first, replicas)) - 1

    def _keep(self, place: Place) -> None:
        """Add (29) for a place."""
        model, asking = self.model, defaultdict(list)
        for choice, term in self._first:
            asking[self._older(choice, place[1])].append(term)
        counts = sorted({0, *asking})
        name = f"{place[0]}_{place[1]}"
        self._kept[place] = kept = {count: (model.program.binary(f"k_{name}_{count}"), 1.0) for count in counts}
        model.program.equal([*kept.values(), *model.selected(place, -1.0)])
        for least in counts:
            if least > 0:
                enough = [term for count, term in kept.items() if count >= least]
                asked = [(variable, -1.0) for count in counts if count >= least for variable, _ in asking[count]]
                model.program.at_least([*enough, *asked, *model.selected(place, -1.0)], -1.0)

    def memory(self, worker: int, parameters: list[float], capacity: dict[Place, float]) -> list[Term]:
        """Add (30) for the stage that starts at `worker`, and return its terms, in the unit of the parameters, which
        are given by block."""
        program, shares = self.model.program, []
        for place in self.model.places(worker):
            for count, (variable, _) in self._kept[place].items():
                share = program.number(f"o_{place[0]}_{place[1]}_{count}")
                most = sum(parameters) if count == 0 else capacity[place] / count
                program.at_most([(share, 1.0), (variable, -most)])
                shares.append((share, float(count)))
        sizes = self.model.sum_at(worker, parameters)
        program.at_most([*sizes, *((share, -1.0) for share, _ in shares)])
        return shares
