"""The terms of the cost model as arrays, for the searches: times and memory of stages, by cut and by placement.

The formulas are those of `pipeplan.cost`. `cost_terms` has what belongs to a problem and its cuts, `stage_terms` what
belongs to stages between two cuts, `topology` the places of a stage, `heterogeneous_terms` the times on each of them,
`replicas` the numbers of replicas that are fast enough, `batch_limit` the time of a batch under a flush schedule, and
`input_stages` what vertical sync assumes of the input stage. Nothing here searches.
"""
