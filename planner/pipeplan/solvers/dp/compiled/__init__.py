"""Plain loops for the searches on equal servers, which numba compiles where it is installed.

`search_loops` goes over the cuts, `cut_loops` over the stages at one cut, `batch_loops` over those of a schedule with a
flush, and `front_loops` keeps the states that no other dominates; `replica_loops` and `stage_loops` size one stage, and
`loop_inputs` and `batch_inputs` have what they read. `compiled_search` calls them in place of the array code of
`uniform_search` and `uniform_flush`, with the same states as its result. `jit` finds numba and a folder for compiled
code. Nothing here decides what is searched for.
"""
