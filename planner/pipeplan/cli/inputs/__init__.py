"""Commands on what plans are made from: list models and clusters, convert other tools' files, calibrate by a run.

Measuring a model or links has a folder of its own, `pipeplan.cli.profile`.
"""
