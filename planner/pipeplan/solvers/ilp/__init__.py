"""The integer program over columns, solved by HiGHS.

`integer_program` is the entry and has the notation; `space_search` solves programs until one's plan costs what the
program says. `cut_table`, `places`, `columns` and `enumeration` find the choices for a stage and their coefficients.
`program` states the program of one pipeline, and `backend` has it solved. Nothing here is shared with the searches of
the dynamic program, so that each can catch the other's mistakes.
"""
