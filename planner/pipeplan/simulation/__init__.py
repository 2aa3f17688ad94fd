"""Replaying a plan in simulated time: the executor's own schedule, with the planner's times. docs/simulate.md."""
