"""The cost model: every formula of docs/cost-model.md, once.

`formulas` holds the plain formulas. `stage_table` has the work, bytes and memory of stages before they have workers,
`stage_times` the times and the memory of one stage of a plan, `depths` the minibatches in flight at each stage, and
`flush` the time of a batch. `ddp_overlap` and `contention` add what plain data parallelism and shared network cards
cost, and `evaluate` scores a whole plan. Both solvers, the simulator and the explanations use these formulas.
`pipeplan.checker` states the formulas a second time on purpose.
"""
