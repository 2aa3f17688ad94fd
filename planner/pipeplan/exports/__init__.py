"""Plans in the words of other trainers, for those who stay with theirs.

target      what every target says of itself, and the list of them; `aim` plans for one, `written` writes its files
one file a target: what it can express, and the files that tell it the plan

degrees     a uniform grid: stages, replicas, microbatches; `servers` and `run` tell where and how it is started
boundaries  where a model can be cut by naming modules; `chain` which of these go together
stacks      a model as a list of blocks that are all alike; `chains` as a list of layers one after another
orders      the order of forward and backward passes; `flight` what a trainer's own does to the prediction
header, python  what generated files say of themselves, and how Python is written
"""
