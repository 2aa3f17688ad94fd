"""Profile a model: measure its layers on this machine, or estimate them for another device.

`profiler.profile_model` does it. `measure_executor` works without torch, so that its trials can begin to import it
before this process does.
"""
