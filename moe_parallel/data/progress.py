"""How a program shows the progress of work on data."""

from collections.abc import Callable
from contextlib import AbstractContextManager

#: Receives the amount of work done since the last call.
Advance = Callable[[int], object]

#: A label and the amount of work (None: unknown) -> a context that gives the function to call with
#: progress.
ShowProgress = Callable[[str, int | None], AbstractContextManager[Advance]]
