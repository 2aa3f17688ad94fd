"""The errors that pipeplan reports to its user.

PipeplanError                  one line: what is wrong, where, and how to fix it; the CLI exits with 2
├── InputError                 a file or an argument is wrong
│   └── TooFewLayersError      more stages are requested than there are layers to divide
├── InfeasibleError            no plan satisfies the constraints
├── NotFoundInTimeError        no plan was found within the time limit; there may be one
└── DisagreementError          two solvers, or a solver and the evaluator, do not agree (a defect of pipeplan)
"""

NO_PLAN_IN_TIME = "no plan was found in time; give more with --time-limit"


class PipeplanError(Exception):
    """Base of all errors whose message is for the user. Only the CLI prints the message and exits."""


class InputError(PipeplanError):
    """A file, a name or an option is unusable."""


class TooFewLayersError(InputError):
    """The layers cannot be divided into the requested number of stages under the schedule of the problem."""


class InfeasibleError(PipeplanError):
    """No plan fits in memory and satisfies the user's constraints."""


class NotFoundInTimeError(PipeplanError):
    """No plan was found within the time limit, and it is not known whether there is one."""


class DisagreementError(PipeplanError):
    """The solvers disagree, so at least one of them is wrong. This error must never be suppressed."""
