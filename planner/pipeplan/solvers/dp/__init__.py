"""The dynamic program: a search over cuts of the model and ranges of workers.

`dynamic_program` is the entry, and `certificate` writes down a proof that `pipeplan check` verifies. The folders, from
the bottom up (each uses only those before it, and `budget` and `threshold`):

    terms      the terms of the cost model as arrays over cuts, stages and placements
    states     what a search keeps at a cut, the stages that it tries there, and bounds on their workers
    steady     the searches for one pace, on uniform and heterogeneous clusters, and under vertical sync
    flush      the searches for one batch of a schedule with a flush
    cuts       which cuts need not be searched, and good selections of them
    pipelines  the fastest pipeline on one component of the cluster, by repeated searches
    spaces     the fastest plan over all spaces of plans, every shared resource to itself
    charged    the fastest plan with everything charged that workers share
"""
