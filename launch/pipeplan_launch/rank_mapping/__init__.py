"""The assignment of processes to the workers of the plan.

It is derived at the start from the locations of the processes, never from a host name in a file.
"""
