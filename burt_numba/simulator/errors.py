"""What the simulator raises."""

from __future__ import annotations


class SimulatorError(RuntimeError):
    """A kernel did something that is an error, or undefined, on a GPU."""

    names_its_place = False
    """The message says which kernel, block and thread."""


class DivergenceError(SimulatorError):
    """Threads wait for others that cannot arrive: at a barrier, a collective, or at different ones."""


class RaceError(SimulatorError):
    """Two threads access one element, at least one of them writes it, and nothing orders them."""

    names_its_place = True


class UninitializedReadError(SimulatorError):
    """A read of memory that nobody wrote."""

    names_its_place = True


class OutOfBoundsError(SimulatorError, IndexError):
    """An index below 0 or past the end of an axis."""

    names_its_place = True


class OrderError(SimulatorError):
    """The result of a kernel depends on the order in which its threads run."""


def annotate(error: BaseException, note: str) -> None:
    """Attach ``note`` to ``error`` without changing its type."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        # Python 3.10 has no notes, so the place goes in front of the message.
        error.args = (f"{note}: {error.args[0]}", *error.args[1:])
    elif not error.args:
        error.args = (note,)
