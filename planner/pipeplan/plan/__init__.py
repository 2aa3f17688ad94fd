"""Plans: which layers each stage holds, on which workers, with how many minibatches in flight.

This package holds the plan as pure data and the table of schedules with the arithmetic that follows from a schedule
alone: weight versions, update lag, rounds. What a plan costs is the task of `pipeplan.cost`.
"""
