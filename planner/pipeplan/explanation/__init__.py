"""Why a plan is what it is: its bottleneck, the second-best plan, what-ifs, and its sensitivity. docs/choice.md.

For a problem without a plan it is the diagnosis of `planning/infeasibility.py`.
"""
