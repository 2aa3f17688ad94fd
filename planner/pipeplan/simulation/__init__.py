"""Simulates a plan: plays the executor's own schedule with the planner's times (docs/simulate.md)."""
