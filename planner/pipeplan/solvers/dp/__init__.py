"""The dynamic program: a search over cuts of the model and ranges of workers.

`dynamic_program` is the entry. It enumerates frames (copies of the pipeline, number of stages, the input stage of
vertical sync), searches each with the labels of the uniform or the heterogeneous search, and turns the best labels
into plans. `certificate` writes down a proof that `pipeplan check` verifies.
"""
