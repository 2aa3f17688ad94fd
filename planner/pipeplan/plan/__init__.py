"""Plans as pure data, the table of schedules, and the figures that follow from a schedule alone.

A plan has the layers, the workers and the minibatches in flight of each stage. `pipeplan.cost` computes its cost.
"""
