"""The integer program: the same problem as constraints, solved by HiGHS or CBC.

`integer_program` is the entry, `model` states the variables and constraints, and the other modules add memory,
in-flight depth, flush schedules and what workers share. `choices` leaves out beforehand what no plan can have. It
shares no search with the dynamic program, so that each can catch the other's mistakes.
"""
