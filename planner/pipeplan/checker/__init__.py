"""Checks a plan.json against its profile: structure, stated cost, claims, and the certificate that no plan is faster.

Nothing here uses the solvers, the cost model or the evaluator. The formulas are written out again from
docs/cost-model.md, cuts are enumerated anew, and the certificate is verified by the rules that docs/proof.md states
and proves. A mistake in the formulas and searches of the solvers therefore does not go unseen here. The readers of
profiles and clusters, and the rescaling to another minibatch, are shared; they have oracles in the tests.
"""
