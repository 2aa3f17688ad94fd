"""The assignment of processes to the workers of the plan.

It is derived when a run starts, from the locations of the processes, and never from a host name in a file.
"""
