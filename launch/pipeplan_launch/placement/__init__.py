"""Assigns the processes of a launch to the workers of the plan, and checks that the links are as planned.

The assignment is derived at the start from where the processes run, never from host names in a file.

    where       the location of one process, as it reports it
    packing     packs the plan's servers onto machines in as few pieces as possible
    derive      the assignment, from the sizes of the plan's servers and the locations of all processes
    seats       the assignment as every process knows it: workers, servers, devices
    levels      the link rates that the plan was made for, from its stage files
    crossing    which workers talk to each other across servers, busiest first
    probe       measures the links between servers for two seconds
    notes       the lines printed where the measured rates fall short of the planned ones
    check       runs the probe and returns these lines

All but `probe` and `check` are torch-free.
"""
