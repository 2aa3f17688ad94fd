"""The integer program over columns, solved by HiGHS.

`integer_program` is the entry point and has the notation. `space_search` solves programs until the cost of a program's
plan is what the program says. `cut_table`, `places`, `columns` and `enumeration` find the choices for a stage and their
coefficients. `program` states the program of one pipeline, and `backend` calls the solver. This code shares nothing
with the searches of the dynamic program, so that each solver can reveal mistakes of the other.
"""
