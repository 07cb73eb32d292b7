"""What the simulator raises."""

from __future__ import annotations


class SimulatorError(RuntimeError):
    """A kernel did something that is an error, or undefined, on a GPU."""


class DivergenceError(SimulatorError):
    """Threads wait for others that cannot arrive: at a barrier, a collective, or at different ones."""


def annotate(error: BaseException, note: str) -> None:
    """Attach ``note`` to ``error`` without changing its type."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        # Python 3.10 has no notes, so the place goes in front of the message.
        error.args = (f"{note}: {error.args[0]}", *error.args[1:])
    elif not error.args:
        error.args = (note,)
