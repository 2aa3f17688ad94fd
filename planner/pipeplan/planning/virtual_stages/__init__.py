"""Plans whose workers run several stages each, under `interleaved-1f1b` and `zb-v`: their search and their answers.

`virtual_search` finds these plans with the cuts of `virtual_cuts`, and proves only a bound. `solve_virtual` compares
the best plan found with ordinary plans.
"""
