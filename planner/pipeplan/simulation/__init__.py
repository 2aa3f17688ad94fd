"""Simulates a plan: runs the executor's own schedule with the planner's times (docs/report.md).

`engine` advances the time and records the `events`. `workers` and `fair_share` carry messages. Other modules make
scenarios from plans, measure the result and draw it. tests/evaluation runs the real executor on emulated servers.
"""
