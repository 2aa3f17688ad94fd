"""Jobs: the user's model, loss, data and optimiser, and how they are found and checked.

`loading` runs the user's code, and `user_code` reports its errors as the user's. `runtime` runs a job.
"""
