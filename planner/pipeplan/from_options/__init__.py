"""From what the user says to a problem, for the command line and the Python API alike.

`option_fields` makes fields of `Options` of arguments and keywords; `build_problem` makes the problem, with the
schedule, the minibatch size, the order of servers or the other trainer that it is for.
"""
