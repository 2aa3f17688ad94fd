"""The cost model: every formula of docs/cost-model.md, once.

`formulas` has the formulas of single terms. `stage_table` has the work, bytes and memory of stages without workers.
`stage_times` has the times and the memory of one stage of a plan, `depths` the minibatches in flight, and `flush` the
time of a batch. `ddp_overlap` charges the all-reduce of plain data parallelism, and `contention` the shared network
cards. `evaluate` computes the cost of a whole plan. Both solvers, the simulator and the explanations use these modules.
`pipeplan.checker` implements the formulas a second time, independently.
"""
