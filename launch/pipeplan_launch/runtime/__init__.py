"""One worker's training and inference: the engine, weight versions, the stage optimiser and the data.

`stage_setup` builds the stage that a worker runs, `epochs` runs the epochs, and `training` executes the schedule of
one epoch. Messages travel through `comm`; processes are started and joined by `elastic`.
"""
