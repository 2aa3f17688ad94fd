"""Builds a problem from the user's options, for the command line and the Python API.

`option_fields` turns arguments and keywords into fields of `Options`. `build_problem` builds the problem, and chooses
the schedule, the minibatch size and the order of servers, or takes those of another trainer.
"""
