"""The bundled models, one module each with a `build() -> Job`.

Their names and sizes are listed in `pipeplan_launch.job.bundled_models`, which needs no torch.
"""
