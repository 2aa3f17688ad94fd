"""The searches for a pipeline within one pace, for schedules without a flush.

`uniform_search` is for equal servers, `heterogeneous_search` for servers that differ and for parallel links, and
`vertical_sync` repeats them for what it assumes of the input stage. `placed_steps` computes the pace and the memory of
one pipeline that was found.
"""
