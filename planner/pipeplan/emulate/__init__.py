"""Replay of a plan without its hardware, by the real executor on emulated servers of this machine.

scaling     the factors between emulated and real bytes, rates and times
servers     the cluster as a tree of switches and shaped cables
rings       all-reduces on these cables
folder      the emulated plan folder, whose stages sleep instead of computing
machine     the requirements on this machine
prepared    a plan with its scaling and the order to emulate it
carry       runs an order in namespaces of its own and removes them afterwards
watching    the progress of a replay
run         one replay, from the plan folder to its measurements
measured    measurements from the run folder and the cables' counters
predicted   the predicted traffic of the cables
outcome     the result of a replay
cause       the main cause of the difference to the prediction, in a sentence
faults      the syntax of faults
fault_run   one replay with a fault
promises    the executor's promises about faults, and whether they were kept
"""
