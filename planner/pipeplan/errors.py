"""What pipeplan tells a user who gave it something it cannot use.

PipeplanError                  one line: what is wrong, where, what to do; the CLI exits with 2
├── InputError                 a file or an argument is wrong
├── InfeasibleError            no plan satisfies the constraints
└── DisagreementError          two solvers, or a solver and the evaluator, do not agree (a defect of pipeplan)
"""


class PipeplanError(Exception):
    """A message for the user. Only the CLI prints it and exits."""


class InputError(PipeplanError):
    """A file, a name or an option that cannot be used as it is."""


class InfeasibleError(PipeplanError):
    """No plan satisfies memory and the user's constraints."""


class DisagreementError(PipeplanError):
    """The solvers disagree: never to be ignored, because one of them is wrong."""
