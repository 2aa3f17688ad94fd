"""The bundled models, each built by a function that returns a `Job`, and stages that sleep instead of running a model.

Names and sizes are listed in `pipeplan_launch.job.bundled_models`, which needs no torch.
"""
