"""From a problem to an answer: both solvers, their agreement, baselines and the verdict.

`solve` is the entry: `settings` are what it is told, and an `outcome` is what it returns. This package also chooses
among problems: the schedule, the minibatch size, the fewest workers. Files and tables are written elsewhere
(`pipeplan.rendering`, `pipeplan.drawing`).
"""
