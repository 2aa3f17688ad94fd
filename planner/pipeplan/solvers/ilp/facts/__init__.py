"""Facts about a pipeline within an upper bound on its pace, before any program.

`layers` joins layers into blocks, `placements` lists where a stage may be, and `placement_facts` says what the workers
there can do.
"""
