"""Errors that a user can mend."""


class InputError(ValueError):
    """A wrong flag, file or value. The message is one line: what, which value, what to do.

    The program prints it once, without a traceback, and exits with code 2.
    """
