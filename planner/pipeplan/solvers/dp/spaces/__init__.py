"""The fastest plan over all spaces of plans (`solvers.plan_space`), with every shared resource to itself.

`batch_spaces` searches all spaces together under a flush schedule, `grid` has the uniform grids, and `first_plan` finds
a plan and a bound for a large problem before all other searches.
"""
