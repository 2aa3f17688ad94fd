"""Checks a plan.json against its profile: structure, stated cost, claims, and the certificate that no plan is faster.

The checker does not use the solvers, the cost model or the evaluator. It implements the formulas of docs/cost-model.md
again, enumerates cuts again, and verifies the certificate by the rules of docs/proof.md. So it finds mistakes in the
formulas and searches of the solvers. It shares only the readers of profiles and clusters and the rescaling to another
minibatch with the planner; the tests check these parts against oracles.
"""
