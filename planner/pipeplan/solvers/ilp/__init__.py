"""The integer program: the same problem as constraints, solved by HiGHS or CBC.

`integer_program` is the entry and has the notation; `space_search` solves programs until one's plan costs what the
program says. `facts` are what is known before any program, `enumeration` finds the stages that a plan may have,
`constraints` states the program of one pipeline, and `milp` has it solved. Nothing here is shared with the searches of
the dynamic program, so that each can catch the other's mistakes.
"""
