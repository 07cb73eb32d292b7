"""The command line ``burt-numba``: info, check, run, plan and bench."""

from burt_numba.cli.command import main

__all__ = ["main"]
