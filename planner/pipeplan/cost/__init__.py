"""The cost model: every formula of docs/cost-model.md, once.

`formulas` holds the plain formulas, `stage_times` and `flush` apply them to a stage, `ddp_overlap` and `contention`
add what plain data parallelism and shared network cards cost, and `evaluate` scores a whole plan. Both solvers, the
simulator and the explanations read the formulas here; `pipeplan.checker` writes them out again on purpose.
"""
