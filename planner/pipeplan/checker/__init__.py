"""Checks a plan.json against its profile: structure, stated cost, claims, and the certificate that no plan is faster.

Nothing here uses the solvers, the cost model or the evaluator. The formulas are implemented again from
docs/cost-model.md, cuts are enumerated again, and the certificate is verified by the rules that docs/proof.md states
and proves. So a mistake in the formulas and searches of the solvers is found here. Only the readers of profiles and
clusters, and the rescaling to another minibatch, are shared; the tests check them against oracles.
"""
