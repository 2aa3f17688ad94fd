"""Plain loops for the steady-state search on equal servers, which numba compiles where it is installed.

`search_loops` goes over the cuts, `cut_loops` over the stages at one cut, and `front_loops` keeps the states that no
other dominates; `replica_loops` and `stage_loops` size one stage, and `loop_inputs` has what they read.
`compiled_search` calls them in place of the array code of `uniform_search`, with the same states as its result. `jit`
finds numba and a folder for compiled code. Nothing here decides what is searched for.
"""
