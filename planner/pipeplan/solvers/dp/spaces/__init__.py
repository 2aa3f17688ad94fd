"""The fastest plan over all spaces of plans (`solvers.plan_space`), with every shared resource to itself.

A `search_task` is what is asked. `search_spaces` searches one space after another and keeps the `best_so_far`, or under
a flush schedule has `batch_spaces` search all together; `search_grids` searches the shapes of uniform grids, of which
`grid` knows the paces without a memory limit. `results` states what was found and proven. `first_plan` finds a plan and
a bound for a large problem before all other searches.
"""
