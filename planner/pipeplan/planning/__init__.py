"""From a problem to an answer: both solvers, their agreement, baselines and the verdict.

The entry point is `solve`. This function takes `settings` and returns an `outcome`. This package also chooses among
problems: the schedule, the minibatch size, the number of workers. `pipeplan.rendering` and `pipeplan.drawing` write
files and tables.
"""
