"""Commands that search for plans, and the options that they share.

`solve` finds the best plan of one problem, `replan` of what is left of a cluster, `sweep` those of many problems, and
`explain` the reasons for one. `problem_options` describe a problem, `solver_options` how long and by what it is solved;
`solve_line` shows how far a search has come, and `grouped_help` lists the options under headings. The searching itself
is done by `pipeplan.planning`.
"""
