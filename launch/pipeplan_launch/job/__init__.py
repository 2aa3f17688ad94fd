"""Jobs: the user's model, loss, data and optimiser, and how they are found and checked.

This room loads the user's code, tells the mistakes in it from our own, and holds what a job declares: callbacks,
autocast, random seeds, and the list of bundled models. Running a job is the task of `runtime`.
"""
