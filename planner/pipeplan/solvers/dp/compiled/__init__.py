"""Plain loops for the steady-state search on equal servers, which numba compiles where it is installed.

`replica_loops`, `stage_loops` and `cut_loops` find the states at one cut, one stage after another; `loop_inputs` has
what they read. `compiled_search` calls them cut by cut in place of the array code of `uniform_search`, with the same
states as its result. `jit` finds numba and a folder for compiled code. Nothing here decides what is searched for.
"""
