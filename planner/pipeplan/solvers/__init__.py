"""The two solvers, a dynamic program and an integer program, and what both return.

They share the formulas of `pipeplan.cost` and no search. Choosing between them, cross-checking them and comparing
their plan with baselines is the task of `pipeplan.planning`.
"""
