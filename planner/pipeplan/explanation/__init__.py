"""Explains a plan: its bottleneck, the second-best plan, what-ifs, and its sensitivity. See docs/choice.md.

`planning/infeasibility.py` has the diagnosis of a problem without a plan.
"""
