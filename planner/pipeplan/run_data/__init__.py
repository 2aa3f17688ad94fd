"""Measurements of a run of a plan, read from its run folder.

The executor writes these files (`pipeplan_launch.telemetry`); calibration, replanning and reports read them here.
"""
