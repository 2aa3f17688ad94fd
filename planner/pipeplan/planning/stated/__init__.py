"""The pace that an answer states for a plan: simulated where a simulation is affordable, and by the formulas elsewhere.

Choices between plans, and comparisons with others, are made by stated paces. What is searched and proven is not here:
solvers know the formulas alone.
"""
