"""The dynamic program: a search over cuts of the model and ranges of workers.

The entry point is `dynamic_program`. `certificate` writes a proof that `pipeplan check` verifies. From the bottom up:

    budget, threshold                the limits of one search, and bisection over thresholds
    search/                          the search for a pipeline within one threshold, and the cost model as arrays
    cut_selection                    selects the cuts to search
    find_pipeline                    selects the search and the cost terms for a cluster and a schedule
    pipeline_searches                the fastest pipeline on one component of the cluster, by repeated searches
    results, spaces, grids           the fastest plan over all spaces of plans, without contention
    charged                          the fastest plan with contention
"""
