"""Decides whether a pipeline keeps within one threshold.

The terms of the cost model as arrays: `cost_terms` has what belongs to a problem and its cuts, `stage_terms` what
belongs to stages between two cuts, `topology` the places of a stage, `heterogeneous_terms` the times on each of them,
`replicas` the numbers of replicas that are fast enough, and `batch_limit` the time of a batch under a flush schedule.

The parts of a search: `states` at a cut and which of them dominates which, `stage_sizing` the replicas and depths of
stages, `worker_bounds` the workers that the stages in front of a cut need at least.

The searches: `uniform_search` uses the symmetry of equal servers. `placement_search` tries all candidate placements,
and charges what workers share (`shared_resources`, `resource_levels`). `flush_search` has both for batches.
`placed_steps` computes the step time and the memory of one pipeline that was found.
"""
