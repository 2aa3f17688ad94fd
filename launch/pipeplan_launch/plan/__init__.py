"""The plan folder as the executor reads it, and the schedule that follows from it.

The JSON files, which `stage_files` reads, are the contract with the planner. The schedule is pure data without torch,
so that the planner simulates the action streams that run here. `schedule_check` replays them and finds deadlocks and
mismatched minibatches.
"""
