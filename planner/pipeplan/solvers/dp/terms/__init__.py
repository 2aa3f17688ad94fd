"""The terms of the cost model as arrays, for the searches: times and memory of stages, by cut and by placement.

The formulas are those of `pipeplan.cost`. `stage_costs` has the stages that end at one cut, `topology` the places of a
stage, `replicas` the numbers of replicas that are fast enough, `batch_limit` the time of a batch under a flush
schedule, and `input_stages` what vertical sync assumes of the input stage. Nothing here searches.
"""
