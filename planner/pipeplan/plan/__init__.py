"""Plans: which layers each stage holds, on which workers, with how many minibatches in flight.

This package holds the plan as pure data and the table of schedules. The package computes what follows from a schedule
alone: weight versions, update lag, rounds. `pipeplan.cost` computes what a plan costs.
"""
