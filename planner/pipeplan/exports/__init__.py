"""Plans in the words of other trainers, for those who stay with theirs.

target      what every target says of itself, and the list of them
one file a target: what it can express, and the files that tell it the plan
"""
