"""The stages that a plan within an upper bound on the pace may have, enumerated before any program.

`choices` is the entry. A stage lies between two `closed_sets` on a place of `place_table`; `stage_fit` and
`stage_memory` leave out what cannot be by itself, and `in_flight` what fits on no path. Which plan is the best one is
left to the program.
"""
