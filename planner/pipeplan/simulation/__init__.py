"""Replays a plan in simulated time: the executor's own schedule, with the planner's times. docs/report.md.

`engine` advances the time and yields the `events`, `serial_links` and `fair_share` carry messages, and other modules
make scenarios of plans, measure the result and draw it. Running the real executor on emulated servers is the task of
tests/evaluation.
"""
