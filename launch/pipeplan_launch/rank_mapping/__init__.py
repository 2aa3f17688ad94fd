"""Which process is which worker of the plan, and whether the links between them are as planned.

The mapping is derived at the start from where the processes run, never from a host name in a file. `link_check`
compares the planned with the measured links and prints one warning.
"""
