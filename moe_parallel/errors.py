"""Errors that a user can correct, or that go away at another start."""


class InputError(ValueError):
    """A wrong flag, file or value. The message is one line: what is wrong, the value, what to do.

    The program prints it once, without a traceback, and exits with code 2.
    """


class Busy(InputError):
    """Another run uses a folder, and may soon leave it. The program exits with code 75."""


class Unmet(RuntimeError):
    """The ranks of a job did not find each other in time. The program exits with code 76."""


class Damaged(InputError):
    """A file is not what was saved. The last clause of the message, after `; `, is the remedy."""
