"""What a user's mistake becomes: one line and exit status 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """A mistake that one line explains."""


@contextmanager
def refusals_of(function: str) -> Iterator[None]:
    """Turn what ``function`` refuses, always named in front of the message, into a :class:`UsageError`.

    Any other exception is a fault of ours and keeps its traceback.
    """
    try:
        yield
    except (TypeError, ValueError, MemoryError) as error:
        if str(error).startswith(f"{function}:"):
            raise UsageError(str(error)) from None
        raise
