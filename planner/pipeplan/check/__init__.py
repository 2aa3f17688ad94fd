"""Checks a plan.json against its profile: structure, stated cost, and the certificate that no plan is faster.

This package uses neither the solvers nor the cost model nor the evaluator. It implements the formulas of
docs/cost-model.md a second time, enumerates the cuts itself, and verifies the certificate by the rules that
docs/check.md states and proves. So it detects mistakes in code that the solvers and the evaluator share.
"""
