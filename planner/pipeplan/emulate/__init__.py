"""Replaying a plan without its hardware: the real executor on emulated servers of this machine.

scaling     by how much bytes, rates and times differ from the real ones
servers     the cluster as a tree of switches and shaped cables
folder      the plan folder that the executor is given: stages that sleep
machine     what this machine lacks for it
prepared    a plan made ready, and the order for it
carry       has an order carried out; whatever happens, all of it goes
watching    how far it has come
run         one replay, from the plan folder to what was measured
measured    what the run and the counters of its cables show
predicted   what the plan expects of the cables
outcome     what a replay comes to, for people and programs
cause       where the difference comes from, in a sentence
faults      a fault as people write it
fault_run   one replay with a fault in it
promises    what the executor promises of it, and whether that is what happened
"""
