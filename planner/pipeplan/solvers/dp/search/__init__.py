"""Decides whether a pipeline stays within one threshold.

The terms of the cost model as arrays: `cost_terms` has the terms of a problem and its cuts, `stage_terms` the terms of
stages between two cuts, and `topology` the placements of a stage. `heterogeneous_terms` has the times on placements,
`replicas` the numbers of replicas that are fast enough, and `batch_limit` the time of a batch under a flush schedule.

The parts of a search: `states` has the states at a cut and the dominance relation between them, `stage_sizing` the
replicas and depths of stages, `worker_bounds` lower bounds on the workers of the stages in front of a cut.

The searches: `uniform_search` uses the symmetry of equal servers. `placement_search` tries all candidate placements,
and charges contention (`shared_resources`, `resource_levels`). `flush_search` has both searches for batches. All
searches start at the output end: a stage "in front of" another is nearer to the input. `placed_steps` computes the step
time and the memory of one pipeline that was found.
"""
