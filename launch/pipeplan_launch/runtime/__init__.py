"""One worker's training and inference: the engine, weight versions, the stage optimiser and the data.

`stage_setup` builds the stage that a worker runs, `epochs` runs the epochs, `action_stream` goes through the schedule,
and `pipeline_training` has a step from top to bottom. Messages travel through `comm`; `elastic` joins the processes.
"""
