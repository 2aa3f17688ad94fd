"""Which worker of the plan every process is: derived at the start from who is where, never from a host name in a file.

    where       what a process says of where it is
    packing     servers of the plan onto machines, over as few of them as can be
    derive      the mapping, from the sizes of servers and the places of processes
    seats       what all know once they are there: workers, machines, devices
    levels      the rates that the plan was made for, from its stage files
    crossing    who talks to whom between machines, worst first
    pace        what a minibatch takes where links are slower than planned
    probe       measures links, for two seconds in all
    check       compares, and says what it costs

All but `probe` and `check` are torch-free: data in, data out.
"""
