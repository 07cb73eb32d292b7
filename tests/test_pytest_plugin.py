"""The pytest option --cuda-checks, on suites of a user, each in a process of its own."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from textwrap import dedent

import pytest

from burt_numba import pytest_plugin

pytestmark = pytest.mark.skipif(
    os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu", reason="runs kernels of users in the simulator"
)

# Read before they are written by another thread (a race), never written (uninitialised), past the end, and right.
KERNELS = """
    import numpy as np
    import pytest
    from numba import cuda


    @cuda.jit
    def shift(values):
        i = cuda.threadIdx.x
        if i + 1 < values.size:
            values[i] = values[i + 1]


    @cuda.jit
    def unwritten(values):
        partial = cuda.shared.array(4, np.float32)
        values[cuda.threadIdx.x] = partial[cuda.threadIdx.x]


    @cuda.jit
    def from_the_end(values):
        values[cuda.threadIdx.x] = values[cuda.threadIdx.x - 8]


    @cuda.jit
    def double(values):
        values[cuda.threadIdx.x] *= 2


    def run(kernel):
        values = np.arange(8, dtype=np.float32)
        kernel[1, 4](values)
        return values


    def test_race():
        assert run(shift)[0] == 1


    def test_uninitialized():
        run(unwritten)


    def test_bounds():
        run(from_the_end)


    def test_right():
        assert run(double)[3] == 6
"""


@pytest.fixture
def suite(tmp_path):
    """Run pytest in a folder with this test file, with no target chosen unless it is given."""

    def call(source, *options, conftest="", environment=None):
        (tmp_path / "test_kernels.py").write_text(dedent(source))
        (tmp_path / "conftest.py").write_text(dedent(conftest))
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NUMBA_ENABLE_CUDASIM", "PYTEST_ADDOPTS") and not name.startswith("PYTEST_XDIST")
        }
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", *options],
            env={**inherited, **(environment or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def outcomes(done):
    """What became of each test, by its name."""
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) test_kernels\.py::(\w+)", done.stdout, re.MULTILINE)
    return {name: outcome for outcome, name in found}


PASSED, FAILED = "PASSED", "FAILED"
ALL_PASS = {"test_race": PASSED, "test_uninitialized": PASSED, "test_bounds": PASSED, "test_right": PASSED}


def test_the_plugin_is_registered():
    (plugin,) = {entry.load() for entry in entry_points(group="pytest11", name="burt_numba")}
    assert plugin is pytest_plugin


def test_without_the_option_wrong_kernels_pass(suite):
    done = suite(KERNELS, environment={"NUMBA_ENABLE_CUDASIM": "1"}, conftest=INSTALL)
    assert outcomes(done) == ALL_PASS, done.stdout
    assert "cuda checks" not in done.stdout


INSTALL = """
    from burt_numba import simulator

    simulator.install()
"""


@pytest.mark.parametrize("option", ["--cuda-checks", "--cuda-checks=all"])
def test_wrong_kernels_fail_and_right_ones_pass(suite, option):
    done = suite(KERNELS, option)
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes(done) == {**ALL_PASS, "test_race": FAILED, "test_uninitialized": FAILED, "test_bounds": FAILED}
    assert "cuda checks: races, uninitialized, bounds, barriers" in done.stdout
    # Python 3.10 has no notes: there the place stands in front of the message.
    assert re.search(r"RaceError: .*kernel shift: race on array values\[1\]", done.stdout)
    assert re.search(r"UninitializedReadError: .*kernel unwritten, block", done.stdout)
    assert re.search(r"OutOfBoundsError: .*kernel from_the_end, block", done.stdout)


@pytest.mark.parametrize(
    ("kinds", "failed"),
    [
        ("races", {"test_race"}),
        ("uninitialized, bounds", {"test_uninitialized", "test_bounds"}),
        ("barriers", set()),
    ],
)
def test_kinds_are_chosen(suite, kinds, failed):
    done = suite(KERNELS, "--cuda-checks", kinds)
    assert outcomes(done) == {**ALL_PASS, **dict.fromkeys(failed, FAILED)}, done.stdout + done.stderr


def test_with_xdist(suite):
    pytest.importorskip("xdist")
    done = suite(KERNELS, "-n", "2", "--cuda-checks=races")
    assert outcomes(done) == {**ALL_PASS, "test_race": FAILED}, done.stdout + done.stderr


def test_from_the_configuration(suite):
    done = suite(KERNELS, environment={"PYTEST_ADDOPTS": "--cuda-checks=races"})
    assert outcomes(done) == {**ALL_PASS, "test_race": FAILED}, done.stdout + done.stderr


def test_the_simulator_is_there_before_any_conftest(suite):
    conftest = """
        import os
        from numba import cuda

        assert os.environ["NUMBA_ENABLE_CUDASIM"] == "1"
        assert cuda.shfl_sync.__module__.startswith("burt_numba.simulator")
    """
    done = suite("def test_nothing(): pass", "--cuda-checks", conftest=conftest)
    assert outcomes(done) == {"test_nothing": PASSED}, done.stdout + done.stderr


def test_fixtures_are_checked(suite):
    source = (
        KERNELS
        + """

    @pytest.fixture
    def before():
        run(shift)

    @pytest.fixture
    def after():
        yield
        run(unwritten)

    def test_before(before):
        pass

    def test_after(after):
        pass
    """
    )
    done = suite(source, "--cuda-checks", "-k", "before or after")
    assert outcomes(done) == {"test_before": "ERROR", "test_after": "ERROR"}, done.stdout
    assert "RaceError" in done.stdout
    assert "UninitializedReadError" in done.stdout


MARKED = (
    KERNELS
    + """

    @pytest.mark.no_cuda_checks({reason})
    class TestRaces:
        def test_race_again(self):
            run(shift)
    """
)


@pytest.mark.parametrize("reason", ["'every value is right'", "reason='every value is right'"])
def test_a_marked_test_runs_without_the_checks(suite, reason):
    done = suite(MARKED.format(reason=reason), "--cuda-checks", "-k", "race")
    assert outcomes(done) == {"test_race": FAILED, "TestRaces": PASSED}, done.stdout


def test_the_mark_is_known_without_the_option(suite):
    done = suite("import pytest\n\n@pytest.mark.no_cuda_checks('why')\ndef test_nothing(): pass")
    assert outcomes(done) == {"test_nothing": PASSED}, done.stdout


def test_a_mark_without_a_reason(suite):
    done = suite(MARKED.format(reason=""), "--cuda-checks")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TestRaces::test_race_again: no_cuda_checks: expected a reason" in done.stderr + done.stdout


@pytest.mark.parametrize("kinds", ["reads", "races,reads", "", "test_kernels.py"])
def test_unknown_kinds(suite, kinds):
    done = suite(KERNELS, "--cuda-checks", kinds)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--cuda-checks: expected all, or some of races, uninitialized, bounds, barriers" in done.stderr
    assert f"got {kinds.rpartition(',')[2]!r}" in done.stderr


def test_the_simulator_is_ruled_out(suite):
    done = suite(KERNELS, "--cuda-checks", environment={"NUMBA_ENABLE_CUDASIM": "0"})
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "which NUMBA_ENABLE_CUDASIM=0 rules out" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_numba_is_there_already(suite, tmp_path):
    (tmp_path / "early.py").write_text("from numba import cuda")
    done = suite(KERNELS, "-p", "early", "--cuda-checks", environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "Numba was imported for a GPU before the option was read" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_nothing_is_imported_without_the_option(suite):
    source = """
        import sys

        def test_modules():
            ours = sorted(name for name in sys.modules if name.startswith("burt_numba"))
            assert ours == ["burt_numba", "burt_numba.pytest_plugin"]
            assert not {"numpy", "numba", "greenlet"} & set(sys.modules)
    """
    # Other plugins of the environment (hypothesis) may import NumPy.
    done = suite(source, environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, conftest=PLUGIN)
    assert outcomes(done) == {"test_modules": PASSED}, done.stdout


PLUGIN = "pytest_plugins = ['burt_numba.pytest_plugin']"
