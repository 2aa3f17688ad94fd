"""The two solvers, a dynamic program and an integer program, and the result that both return.

The solvers share the formulas of `pipeplan.cost`, but no search. `pipeplan.planning` chooses between them, cross-checks
them, and compares their plan with baselines.
"""
