"""The assignment of processes to the workers of the plan.

A run derives the assignment when it starts, from the locations of the processes, never from a host name in a file.
"""
