"""Replays a plan in simulated time: the executor's own schedule, with the planner's times. docs/simulate.md.

`engine` advances the time, `fair_share` divides links among transfers, and the other modules measure and draw the
result. Running the real executor on emulated servers is the task of `pipeplan.replay`.
"""
