"""The pytest option ``--cuda-checks``: every test under `burt_numba.simulator.checks`.

pytest loads this in every run of an environment that has the package. So it imports nothing before the option is
given, and stands outside the simulator, whose package imports NumPy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import pytest

KINDS = ("races", "uninitialized", "bounds", "barriers")


def _kinds(text: str) -> tuple[str, ...]:
    if text == "all":
        return KINDS
    chosen = tuple(name.strip() for name in text.split(","))
    for name in chosen:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(
                f"expected all, or some of {', '.join(KINDS)} with commas between, got {name!r} "
                "(paths come before the option, or after --cuda-checks=all)"
            )
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("burt_numba").addoption(
        "--cuda-checks",
        nargs="?",
        const="all",
        type=_kinds,
        metavar="KINDS",
        help="run Numba CUDA kernels in the simulator of burt_numba and fail tests whose kernels are wrong: all (as "
        f"without KINDS), or some of {', '.join(KINDS)}",
    )


# First of all, so that no conftest.py imports Numba before the simulator is chosen.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if early_config.known_args_namespace.cuda_checks:
        _put_simulator_in()


def _put_simulator_in() -> None:
    setting = os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
    if setting.strip() in ("", "0"):
        raise pytest.UsageError(
            f"--cuda-checks: runs kernels in the simulator, which NUMBA_ENABLE_CUDASIM={setting} rules out"
        )
    from burt_numba import simulator

    try:
        simulator.install()
    except simulator.SimulatorError:
        raise pytest.UsageError(
            "--cuda-checks: Numba was imported for a GPU before the option was read: "
            "set NUMBA_ENABLE_CUDASIM=1 in the environment of pytest"
        ) from None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "no_cuda_checks(reason): its kernels run without the checks of --cuda-checks; say why"
    )
    kinds = config.getoption("cuda_checks")
    if kinds:
        config.pluginmanager.register(CheckedTests(kinds), "burt_numba_cuda_checks")


class CheckedTests:
    """What there is with the option only."""

    def __init__(self, kinds: tuple[str, ...]):
        self.kinds = kinds

    def pytest_report_header(self) -> str:
        return f"cuda checks: {', '.join(self.kinds)}"

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marker = item.get_closest_marker("no_cuda_checks")
            if marker is not None and not (marker.args or marker.kwargs.get("reason")):
                raise pytest.UsageError(f"{item.nodeid}: no_cuda_checks: expected a reason")

    # Around set-up and tear-down too: fixtures launch kernels.
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        if item.get_closest_marker("no_cuda_checks") is not None:
            yield
            return
        from burt_numba.simulator.checking import Checks, checks_everywhere

        # Tests start threads, which launch kernels too.
        with checks_everywhere(Checks(**{kind: kind in self.kinds for kind in KINDS})):
            yield
