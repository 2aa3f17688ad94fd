"""Measures messages and all-reduces between workers, with the transport that the executor uses.

All pairs are measured first, then every level that was found. Finding levels in the measured times is the caller's
task: a survey calls a function that it is given.
"""
