"""Explains a plan: its bottleneck, the baselines and the second choice, the gain of other machines, its robustness."""
