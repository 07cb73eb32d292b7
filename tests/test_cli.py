"""The command line: its commands in this process, and what depends on the start of a process in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import LIMITS, ON_GPU, normal, relative_error

import burt_numba
from burt_numba import reference
from burt_numba.backend import cuda
from burt_numba.cli import driver, main
from burt_numba.cli import plan as plan_module
from burt_numba.cli.check import relative_error as check_relative_error
from burt_numba.cli.command import OPERATIONS
from burt_numba.cli.files import FILES

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run the command line in an empty folder: returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit_:
            status = exit_.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def refused(run):
    """Run the command line, which must say in one line what is wrong, and return that line."""

    def call(*words):
        status, out, err = run(*words)
        lines = [line for line in err.splitlines() if "using the simulator" not in line]
        assert (status, out) == (2, "")
        assert len(lines) == 1, err
        return lines[0]

    return call


def start(*words, **environment):
    """Run the command line in a new process, away from the simulator setting of this one."""
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run(
        [sys.executable, *words],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


# Without work --------------------------------------------------------------------------------------------------------


def test_version(run):
    assert run("--version") == (0, f"burt-numba {burt_numba.__version__}\n", "")


@pytest.mark.parametrize(
    "words", [(), ("run",), *(("run", operation) for operation in OPERATIONS), ("plan",), ("check",)]
)
def test_help(run, words):
    status, out, err = run(*words, "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: burt-numba")


def test_help_imports_neither_numpy_nor_numba_nor_rich():
    script = (
        "import sys\n"
        "from burt_numba.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'rich', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = start("-c", script)
    assert done.returncode == 0, done.stderr


def test_no_command(refused):
    assert refused() == "burt-numba: the following arguments are required: COMMAND"


def test_unknown_command(refused):
    assert "invalid choice: 'dance'" in refused("dance")


@pytest.mark.parametrize(
    "words", [("run", "cifg"), ("plan", "cifg"), ("check", "--op", "cifg"), ("bench", "--op", "x")]
)
def test_unknown_operation(refused, words):
    line = refused(*words)
    assert "invalid choice" in line
    assert "constrained_softmax" in line


# Target --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have so many devices, and such a simulator setting."""

    def pretend(devices, setting):
        monkeypatch.setattr(driver, "device_count", lambda: devices)
        # A value to restore, also where choose_target sets one.
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", setting or "")
        if setting is None:
            del os.environ["NUMBA_ENABLE_CUDASIM"]

    return pretend


@pytest.mark.parametrize(
    ("devices", "setting", "simulated", "message"),
    [
        (0, None, True, "No CUDA device found: using the simulator.\n"),
        (0, "1", True, "NUMBA_ENABLE_CUDASIM=1: using the simulator.\n"),
        (1, "1", True, "NUMBA_ENABLE_CUDASIM=1: using the simulator.\n"),
        (1, None, False, ""),
        (1, "0", False, ""),
    ],
)
def test_choose_target(machine, capsys, devices, setting, simulated, message):
    machine(devices, setting)
    assert driver.choose_target() is simulated
    assert capsys.readouterr().err == message
    if simulated:
        assert os.environ["NUMBA_ENABLE_CUDASIM"] == "1"


def test_no_device_and_no_simulator_allowed(machine, refused):
    machine(0, "0")
    assert "no CUDA device found, and NUMBA_ENABLE_CUDASIM=0" in refused("info")


@pytest.mark.skipif(driver.device_count() > 0, reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_uses_the_simulator(tmp_path):
    np.save(tmp_path / "x.npy", normal((2, 5)))
    options = ["--input", tmp_path / "x.npy", "--output", tmp_path / "y.npz"]
    done = start("-W", "error", "-m", "burt_numba.cli", "run", "constrained_softmax", *map(str, options))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "No CUDA device found: using the simulator.\n"
    assert np.load(tmp_path / "y.npz")["probabilities"].shape == (2, 5)


def test_info(run):
    status, out, _ = run("info")
    assert status == 0
    for word in ("burt_numba", "numba-cuda", "numpy", "driver", "GPU" if ON_GPU else "simulator"):
        assert word in out
    described = [line for line in out.splitlines() if line.startswith("compute capability")]
    assert len(described) == len(driver.devices()) == driver.device_count()


# check ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_check_passes(run, operation):
    status, out, _ = run("check", "--op", operation)
    assert status == 0, out
    assert "FAIL" not in out
    table, legend = out.split("\n\n")
    _, _, *rows = table.splitlines()
    size, *_, last = legend.splitlines()
    assert last == f"{len(rows)} passed, 0 failed"
    assert size.startswith(f"size of {operation}: ")
    # As many letters as numbers.
    assert {row.split("float")[0].count(" × ") for row in rows} == {size.count(" × ")}
    assert {row.split()[0] for row in rows} == {operation}


def scaled(operation):
    return lambda *arguments, **options: operation(*arguments, **options) * np.float32(1.001)


def silent(operation):
    """Records an event that did not happen."""

    def wrong(*arguments, errors, **options):
        bad = np.full((1, 2), np.nan, np.float32)
        burt_numba.constrained_softmax(bad, errors=errors)
        return operation(*arguments, errors=errors, **options)

    return wrong


def loose(operation):
    """Keeps to a bound that is twice as large, and says so in every output."""
    return lambda logits, bound, *arguments, **options: operation(logits, 2 * bound, *arguments, **options)


def unsharpened(operation):
    """Attends as without a bound, and says that it has searched."""

    def wrong(query, keys, values, scale, bound, *arguments, temperature_out, **options):
        operation(query, keys, values, scale, bound, *arguments, temperature_out=temperature_out, **options)
        return operation(query, keys, values, scale, None, *arguments, **options)

    return wrong


def of_other_heads(operation):
    """Takes the heads of the keys in another order."""
    return lambda query, keys, values, *arguments, **options: operation(
        query, keys[:, ::-1], values[:, ::-1], *arguments, **options
    )


def of_all_contexts(operation):
    """Attends to what lies past the length as well."""
    return lambda *arguments, context_lengths, **options: operation(*arguments, **options)


def of_other_keys(operation):
    """Takes the values of the keys before."""
    return lambda query, keys, values, *arguments, **options: operation(
        query, keys, np.roll(values, 1, axis=2), *arguments, **options
    )


def with_a_key_more(operation):
    """Attends to one key past the length, or to one chunk."""
    return lambda *arguments, **options: operation(*arguments[:-1], arguments[-1] + 1, **options)


def with_a_key_more_before_the_chunk_size(operation):
    return lambda *arguments, **options: operation(*arguments[:-2], arguments[-2] + 1, arguments[-1], **options)


def with_maxima_to_base_2(operation):
    """Takes the maxima for logarithms to base 2."""

    def wrong(partials, *arguments, **options):
        partials = partials.copy()
        partials[..., -2] *= np.float32(np.log(2))
        return operation(partials, *arguments, **options)

    return wrong


def with_other_sums(operation):
    """A right result, and the sum of exponentials without its maximum."""

    def wrong(*arguments, lse_out, **options):
        result = operation(*arguments, lse_out=lse_out, **options)
        lse_out -= np.float32(0.01)
        return result

    return wrong


def of_other_chunks(operation):
    """Of all that come, the last chunk in the place of the first."""
    return lambda partials, *arguments, **options: operation(
        np.ascontiguousarray(np.roll(partials, 1, axis=2)), *arguments, **options
    )


def that_leaves_empty_chunks(operation):
    """Right, but that chunks without a key look like others."""

    def wrong(*arguments, **options):
        partials = operation(*arguments, **options)
        partials[..., -2] = np.maximum(partials[..., -2], -1e4)
        return partials

    return wrong


def with_larger_elements(operation):
    """Of partials; their maxima and sums are right."""

    def wrong(*arguments, **options):
        partials = operation(*arguments, **options)
        partials[..., :-2] *= np.float32(1.001)
        return partials

    return wrong


def of_equal_states(operation):
    """Takes the mean, whatever the states have seen."""
    return lambda outs, lses, **options: operation(outs, np.zeros_like(lses), **options)


def unbounded(operation):
    """Forgets and writes, and leaves the largest singular value as it comes."""
    return lambda C, h, x, W_f, b_f, bound, **options: operation(C, h, x, W_f, b_f, 1e6, **options)


def transposed(operation):
    """Forgets columns instead of rows."""

    def wrong(C, *arguments, out, **options):
        out[...] = np.swapaxes(C, -2, -1)
        return operation(out, *arguments, **options)

    return wrong


def in_other_order(operation):
    """Gives the rows to the last tokens first."""

    def wrong(tokens, weights, indices, *arguments, **options):
        result = operation(tokens[::-1], weights[::-1], indices[::-1], *arguments, **options)
        return result._replace(
            dispatch_indices=result.dispatch_indices[::-1], combine_weights=result.combine_weights[::-1]
        )

    return wrong


def of_first_choices(operation):
    """Looks at one choice of each token."""

    def wrong(tokens, weights, indices, *arguments, **options):
        only = np.where(np.arange(indices.shape[1]) == 0, indices, np.int32(-1))
        return operation(tokens, weights, only, *arguments, **options)

    return wrong


def unweighted(operation):
    """Adds up without weights."""

    def wrong(outputs, dispatch, **options):
        ones = np.sign(dispatch.combine_weights)
        return operation(outputs, dispatch._replace(combine_weights=ones), **options)

    return wrong


@pytest.mark.parametrize(
    ("operation", "variant"),
    [
        ("attention_softmax", scaled),
        ("attention_softmax", silent),
        ("constrained_softmax", scaled),
        ("constrained_softmax", loose),
        ("biencoder_attention", silent),
        ("biencoder_attention", unsharpened),
        ("biencoder_attention", of_other_heads),
        ("biencoder_attention", of_all_contexts),
        ("flash_decoding", scaled),
        ("flash_decoding", silent),
        ("flash_decoding", of_other_keys),
        ("flash_decoding", with_a_key_more),
        ("flash_decoding", with_other_sums),
        ("flash_decoding_chunk", with_larger_elements),
        ("flash_decoding_chunk", of_other_keys),
        ("flash_decoding_chunk", with_a_key_more_before_the_chunk_size),
        ("flash_decoding_chunk", that_leaves_empty_chunks),
        ("flash_decoding_reduce", scaled),
        ("flash_decoding_reduce", silent),
        ("flash_decoding_reduce", with_a_key_more),
        ("flash_decoding_reduce", with_maxima_to_base_2),
        ("flash_decoding_reduce", of_other_chunks),
        ("flash_decoding_reduce", with_other_sums),
        ("merge_attention_states", scaled),
        ("merge_attention_states", of_equal_states),
        ("merge_attention_states", with_other_sums),
        ("cifg_update", scaled),
        ("cifg_update", silent),
        ("cifg_update", unbounded),
        ("cifg_update", transposed),
        ("batched_cifg_update", scaled),
        ("batched_cifg_update", unbounded),
        ("batched_cifg_update", transposed),
        ("sparse_moe_dispatch", in_other_order),
        ("sparse_moe_dispatch", of_first_choices),
        ("sparse_moe_dispatch", silent),
        ("sparse_moe_combine", scaled),
        ("sparse_moe_combine", unweighted),
    ],
)
def test_check_notices_a_wrong_operation(run, monkeypatch, operation, variant):
    monkeypatch.setattr(burt_numba, operation, variant(getattr(burt_numba, operation)), raising=False)
    status, out, _ = run("check", "--op", operation)
    assert status == 1
    assert "FAIL" in out
    assert not out.splitlines()[-1].endswith(" 0 failed")


IN_THE_SIMULATOR = pytest.mark.simulator_only("--sanitize starts no other process")


@cuda.jit
def shift(values):
    values[cuda.threadIdx.x] = values[cuda.threadIdx.x + 1]


def racing(operation):
    """Computes the right result, next to a race."""

    def wrong(*arguments, **options):
        shift[1, 4](np.arange(5.0))
        return operation(*arguments, **options)

    return wrong


@IN_THE_SIMULATOR
@pytest.mark.parametrize("operation", OPERATIONS)
def test_check_under_all_checks_passes(run, operation):
    status, out, _ = run("check", "--sanitize", "--op", operation)
    assert status == 0, out
    assert out.splitlines()[0] == "Simulator, checked for races, reads of unwritten memory, bounds and barriers"
    assert out.splitlines()[-1].endswith(" passed, 0 failed")


@IN_THE_SIMULATOR
@pytest.mark.no_cuda_checks("races on purpose, also where no check is asked for")
def test_check_finds_a_race_only_when_asked(run, monkeypatch):
    monkeypatch.setattr(burt_numba, "attention_softmax", racing(burt_numba.attention_softmax), raising=False)
    status, out, _ = run("check", "--op", "attention_softmax")
    assert status == 0, out
    assert out.splitlines()[0] == "Simulator"
    status, out, _ = run("check", "--op", "attention_softmax", "--sanitize")
    assert status == 1
    assert out.count("FAIL: RaceError") == out.count("kernel shift: race on array values[1]") == 24
    assert "attention_softmax 2 × 2 × 5 × 5 causal float16: " in out
    assert out.splitlines()[-1] == "0 passed, 24 failed"


@IN_THE_SIMULATOR
@pytest.mark.no_cuda_checks("races on purpose")
def test_no_check_holds_after_the_command(run):
    run("check", "--sanitize", "--op", "attention_softmax")
    shift[1, 4](np.arange(5.0))


def test_sanitize_where_the_simulator_is_ruled_out(machine, refused):
    machine(1, "0")
    line = refused("check", "--sanitize")
    assert line == "burt-numba check: --sanitize: needs the simulator, which NUMBA_ENABLE_CUDASIM=0 rules out"


@pytest.mark.parametrize("devices", [0, 1])
def test_sanitize_chooses_the_simulator(machine, capsys, devices):
    machine(devices, None)
    assert driver.choose_target("--sanitize") is True
    assert capsys.readouterr().err == "--sanitize: using the simulator.\n"
    assert os.environ["NUMBA_ENABLE_CUDASIM"] == "1"


def test_relative_error_of_what_has_no_size():
    assert check_relative_error(np.array([np.nan, 1.0]), np.ones(2)) == float("inf")
    assert check_relative_error(np.zeros(2), np.zeros(2)) == 0
    assert check_relative_error(np.ones(2), np.zeros(2)) == float("inf")


# run -----------------------------------------------------------------------------------------------------------------


def test_run_constrained_softmax(run, tmp_path):
    logits = normal((2, 3, 40))
    labels = logits.argmax(axis=-1)
    np.savez(tmp_path / "in.npz", logits=logits, labels=labels, other=np.zeros(3))
    status, out, _ = run("run", "constrained_softmax", "--input", "in.npz", "--output", "out.npz")
    assert status == 0

    written = np.load(tmp_path / "out.npz")
    assert sorted(written.files) == ["entropy", "probabilities", "temperature"]
    expected = reference.constrained_softmax(logits, temperature=written["temperature"])
    assert relative_error(written["probabilities"], expected.probabilities) <= LIMITS["float32"]
    np.testing.assert_allclose(written["entropy"], expected.entropy, rtol=1e-5, atol=LIMITS["entropy_reported"])

    before = reference.constrained_softmax(logits, temperature=1.0).entropy
    for line in (
        "constrained_softmax, entropy bound 0.2 nats → out.npz",
        "logits (2, 3, 40) float32",
        f"mean entropy before {before.mean():.4f} nats",
        f"mean entropy after {written['entropy'].astype(float).mean():.4f} nats",
        f"rows where the bound acted {np.sum(before > 0.2)} of 6 ({np.mean(before > 0.2):.1%})",
        "most likely class unchanged in every row",
        "recorded events none",
        "accuracy before, after 1.0000, 1.0000",
    ):
        assert line in [" ".join(shown.split()) for shown in out.splitlines()]


@pytest.mark.parametrize(
    ("option", "value", "parameters"),
    [
        ("--entropy-bound", "0.6", {"entropy_bound": 0.6}),
        ("--temperature-min", "0.7", {"temperature_min": 0.7}),
        ("--temperature-max", "0.8", {"temperature_max": 0.8, "entropy_bound": 0.20}),
        ("--max-iterations", "1", {"max_iterations": 1}),
    ],
)
def test_every_option_of_constrained_softmax_reaches_it(run, tmp_path, option, value, parameters):
    logits = np.concatenate([normal((6, 20)), 30 * np.eye(1, 20, dtype=np.float32)])
    np.save(tmp_path / "in.npy", logits)
    status, _, _ = run("run", "constrained_softmax", "--input", "in.npy", "--output", "out.npz", option, value)
    assert status == 0
    temperatures = []
    for chosen in (parameters, {}):
        temperatures.append(np.empty(7, np.float32))
        errors = burt_numba.ErrorBuffer()
        burt_numba.constrained_softmax(logits, temperature_out=temperatures[-1], errors=errors, **chosen)
    written = np.load(tmp_path / "out.npz")["temperature"]
    np.testing.assert_array_equal(written, temperatures[0])
    assert (written != temperatures[1]).any(), "the option changed nothing"


def test_run_reports_events(run, tmp_path):
    logits = normal((4, 8))
    logits[1, 2] = logits[3, 3] = np.nan
    logits[2, 5] = np.inf
    np.savez(tmp_path / "in.npz", logits)
    status, out, err = run("run", "constrained_softmax", "--input", "in.npz", "--output", "out.npz")
    assert status == 0
    assert "Warning" not in err
    assert "2 × NAN_INPUT (code 1), 1 × INF_INPUT (code 2)" in out
    assert "NAN_INPUT at index 10" in out
    assert np.isfinite(np.load(tmp_path / "out.npz")["probabilities"]).all()


def test_run_converts_float64_and_says_so(run, tmp_path):
    logits = normal((3, 5), dtype=np.float64)
    np.savez(tmp_path / "in.npz", logits)
    status, _, err = run("run", "constrained_softmax", "--input", "in.npz", "--output", "out.npz")
    assert status == 0
    assert "logits: float64 converted to float32." in err.splitlines()
    assert np.load(tmp_path / "out.npz")["probabilities"].dtype == np.float32


def test_run_reads_the_other_byte_order_and_float16(run, tmp_path):
    np.save(tmp_path / "in.npy", normal((3, 5), dtype=">f2"))
    status, _, err = run("run", "constrained_softmax", "--input", "in.npy", "--output", "out.npz")
    assert status == 0, err
    assert np.load(tmp_path / "out.npz")["probabilities"].dtype == np.float16


def test_run_on_no_rows(run, tmp_path):
    np.save(tmp_path / "in.npy", np.zeros((0, 5), np.float32))
    status, out, _ = run("run", "constrained_softmax", "--input", "in.npy", "--output", "out.npz")
    assert status == 0
    assert "0 of 0" in out
    assert np.load(tmp_path / "out.npz")["probabilities"].shape == (0, 5)


@pytest.mark.parametrize("masked", [False, True])
def test_run_attention_softmax(run, tmp_path, masked):
    scores = normal((2, 2, 4, 7))
    mask = np.arange(7) != 2
    np.savez(tmp_path / "in.npz", scores=scores, **({"mask": mask} if masked else {}))
    options = ["--causal", "--causal-offset", 3]
    status, out, _ = run("run", "attention_softmax", "--input", "in.npz", "--output", "out.npz", *options)
    assert status == 0
    written = np.load(tmp_path / "out.npz")
    assert sorted(written.files) == ["entropy", "probabilities"]
    expected = reference.attention_softmax(scores, mask if masked else None, True, causal_offset=3).probabilities
    assert relative_error(written["probabilities"], expected) <= LIMITS["float32"]
    np.testing.assert_allclose(written["entropy"], reference.entropy(expected), atol=1e-5)
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert "causal offset 3" in shown
    assert ("mask (7,) bool" if masked else "mask none") in shown
    assert "rows with no key to attend to 0 of 16 (0.0%)" in shown


def test_run_attention_softmax_counts_rows_without_keys(run, tmp_path):
    mask = np.array([[True], [False]]).reshape(2, 1, 1, 1)
    np.savez(tmp_path / "in.npz", scores=normal((2, 1, 3, 4)), mask=mask)
    status, out, _ = run("run", "attention_softmax", "--input", "in.npz", "--output", "out.npz")
    assert status == 0
    assert "3 of 6 (50.0%)" in out


def memory_arrays(names="C h x W_f b_f", d=6, n=3, batch=(), C_batch=()):
    """Arrays of an update, by name: a memory well within the bound, and what lifts it above."""
    shapes = ((*C_batch, d, d), (*batch, d), (*batch, n), (d, d + n), (d,))
    scales = (0.1, 1.0, 1.0, 0.3, 1.0)
    return {
        name: normal(shape, scale, seed=seed).astype(np.float32)
        for seed, (name, shape, scale) in enumerate(zip(names.split(), shapes, scales, strict=True))
    }


def test_run_cifg_update(run, tmp_path):
    arrays = memory_arrays()
    # In another order, as a transposed memory comes out of NumPy.
    np.savez(tmp_path / "in.npz", **{**arrays, "C": np.asfortranarray(arrays["C"])}, other=np.zeros(3))
    status, out, _ = run("run", "cifg_update", "--input", "in.npz", "--output", "out.npz")
    assert status == 0

    written = np.load(tmp_path / "out.npz")
    assert sorted(written.files) == ["C", "forget_gate", "sigma"]
    expected = reference.cifg_update(**arrays)
    assert relative_error(written["C"], expected.memory) <= LIMITS["float32"]
    np.testing.assert_allclose(written["forget_gate"], expected.forget_gate, rtol=1e-5)
    np.testing.assert_allclose(written["sigma"], expected.sigma, rtol=1e-3)
    assert expected.sigma > 0.95

    shown = [" ".join(line.split()) for line in out.splitlines()]
    change = np.linalg.norm(written["C"] - arrays["C"]) / np.linalg.norm(arrays["C"])
    for line in (
        "cifg_update, spectral bound 0.95 → out.npz",
        "C (6, 6) float32",
        f"mean forget gate {written['forget_gate'].mean():.4f}",
        f"largest sigma before the projection {written['sigma'][0]:.4f}",
        "memories projected 1 of 1 (100.0%)",
        f"change of C, relative {change:.4f}",
        "recorded events none",
    ):
        assert line in shown, out


@pytest.mark.parametrize(("shared", "words"), [(False, ()), (True, ("--shared-memory-mode",))])
def test_run_batched_cifg_update(run, tmp_path, shared, words):
    arrays = memory_arrays("C H X W_f b_f", batch=(3,), C_batch=() if shared else (3,))
    np.savez(tmp_path / "in.npz", **arrays)
    status, out, _ = run("run", "batched_cifg_update", "--input", "in.npz", "--output", "out.npz", *words)
    assert status == 0
    written = np.load(tmp_path / "out.npz")
    expected = reference.batched_cifg_update(**arrays, shared_memory_mode=shared)
    assert relative_error(written["C"], expected.memory) <= LIMITS["float32"]
    np.testing.assert_allclose(written["forget_gate"], expected.forget_gate, rtol=1e-5)
    assert written["sigma"].shape == ((1,) if shared else (3,))
    projected = int(np.sum(expected.sigma > 0.95))
    matrices = 1 if shared else 3
    assert f"{projected} of {matrices} ({projected / matrices:.1%})" in out


@pytest.mark.parametrize(
    ("option", "value", "parameters"),
    [
        ("--spectral-bound", "0.5", {"spectral_bound": 0.5}),
        ("--projection", "scale", {"projection": "scale"}),
        ("--power-iterations", "0", {"power_iterations": 0}),
    ],
)
@pytest.mark.parametrize("function", ["cifg_update", "batched_cifg_update"])
def test_every_option_of_the_memory_reaches_it(run, tmp_path, function, option, value, parameters):
    batched = function == "batched_cifg_update"
    batch = (2,) if batched else ()
    arrays = memory_arrays("C H X W_f b_f" if batched else "C h x W_f b_f", batch=batch, C_batch=batch)
    np.savez(tmp_path / "in.npz", **arrays)
    status, _, _ = run("run", function, "--input", "in.npz", "--output", "out.npz", option, value)
    assert status == 0
    results = []
    for chosen in (parameters, {}):
        results.append(np.empty_like(arrays["C"]))
        # Without any step the projection may miss its bound, which is recorded.
        getattr(burt_numba, function)(**arrays, **chosen, out=results[-1], errors=burt_numba.ErrorBuffer())
    written = np.load(tmp_path / "out.npz")["C"]
    np.testing.assert_array_equal(written, results[0])
    assert (written != results[1]).any(), "the option changed nothing"


def test_run_a_memory_with_events(run, tmp_path):
    arrays = memory_arrays()
    arrays["C"][1, 2] = np.nan
    arrays["h"][3] = np.inf
    np.savez(tmp_path / "in.npz", **arrays)
    status, out, err = run("run", "cifg_update", "--input", "in.npz", "--output", "out.npz")
    assert status == 0
    assert "Warning" not in err
    assert "1 × NAN_INPUT (code 1), 1 × INF_INPUT (code 2)" in out
    assert np.isfinite(np.load(tmp_path / "out.npz")["C"]).all()


@pytest.mark.parametrize("shared", [False, True])
def test_run_a_memory_on_no_samples(run, tmp_path, shared):
    arrays = memory_arrays("C H X W_f b_f", batch=(0,), C_batch=() if shared else (0,))
    np.savez(tmp_path / "in.npz", **arrays)
    words = ["--shared-memory-mode"] * shared
    status, out, _ = run("run", "batched_cifg_update", "--input", "in.npz", "--output", "out.npz", *words)
    assert status == 0
    assert "memories projected" in out
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["C"], arrays["C"])


def context_arrays(B=2, Q=3, K=20, **more):
    """Arrays of an attention to contexts, by name: two heads of keys for four of queries."""
    shapes = {"query": (B, 4, Q, 8), "context_keys": (B, 2, K, 8), "context_values": (B, 2, K, 8)}
    return {name: normal(shape, 1.5, seed=seed) for seed, (name, shape) in enumerate(shapes.items())} | more


@pytest.mark.parametrize(
    ("words", "options", "title"),
    [
        ((), {}, "entropy bound 0.2 nats"),
        (("--entropy-bound", 0.5, "--scale", 0.7), {"entropy_bound": 0.5, "scale": 0.7}, "entropy bound 0.5 nats"),
        (("--no-bound",), {"entropy_bound": None}, "no entropy bound"),
        (("--temperature-min", 0.2, "--temperature-max", 0.6, "--max-iterations", 15), None, "entropy bound 0.2 nats"),
        (("--no-bound", "--precision", "tf32"), {"entropy_bound": None}, "no entropy bound"),
    ],
)
@pytest.mark.parametrize("lengths", [None, [20, 0]])
def test_run_biencoder_attention(run, tmp_path, words, options, title, lengths):
    arrays = context_arrays(**({} if lengths is None else {"context_lengths": np.array(lengths)}))
    np.savez(tmp_path / "in.npz", **arrays)
    status, out, _ = run("run", "biencoder_attention", "--input", "in.npz", "--output", "out.npz", *words)
    assert status == 0
    options = {"temperature_min": 0.2, "temperature_max": 0.6} if options is None else options
    with np.load(tmp_path / "out.npz") as written:
        assert sorted(written.files) == ["entropy", "output", "temperature"]
        output, temperature, entropy = (written[name] for name in ("output", "temperature", "entropy"))
    expected = reference.biencoder_attention(**arrays, **options, temperature=temperature)
    tf32 = "tf32" in words
    assert relative_error(output, expected.output) <= LIMITS["attention_tf32" if tf32 else "attention_float32"]
    if not tf32:
        assert entropy == pytest.approx(expected.entropy, abs=1e-4)
    shown = [" ".join(line.split()) for line in out.splitlines()]
    start = 0.6 if "temperature_max" in options else 1
    acted = np.count_nonzero(temperature < np.float32(start))
    empty = 0 if lengths is None else 12
    for line in (
        f"biencoder_attention, {title} → out.npz",
        "query (2, 4, 3, 8) float32",
        "contexts (2, 2, 20, 8) float32",
        f"queries where the bound acted {acted} of 24 ({acted / 24:.1%})",
        f"queries without a context {empty} of 24 ({empty / 24:.1%})",
    ):
        assert line in shown, out
    assert ("ENTROPY_OVERFLOW (code 3)" in out) == (3 in expected.counts)


@pytest.mark.parametrize("change", [{"B": 0}, {"Q": 0}, {"K": 0}])
def test_run_on_nothing_to_attend_to(run, tmp_path, change):
    np.savez(tmp_path / "in.npz", **context_arrays(**change))
    status, out, _ = run("run", "biencoder_attention", "--input", "in.npz", "--output", "out.npz")
    assert status == 0, out
    assert (np.load(tmp_path / "out.npz")["output"] == 0).all()


def cache_arrays(M=3, S=70, **more):
    """Arrays of decode attention, by name: two heads of the caches for four of the queries."""
    shapes = {"query": (M, 4, 8), "k_cache": (M, 2, S, 8), "v_cache": (M, 2, S, 8)}
    arrays = {name: normal(shape, 1.5, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    return arrays | {"seq_lens": np.array([S, 0, S - 5][:M], np.int64)} | more


def shown_lines(out):
    return [" ".join(line.split()) for line in out.splitlines()]


@pytest.mark.parametrize(
    ("words", "options", "title"),
    [
        ((), {}, "flash_decoding → out.npz"),
        (
            ("--scale", 0.7, "--chunk-size", 16),
            {"scale": 0.7, "chunk_size": 16},
            "flash_decoding, chunks of 16 → out.npz",
        ),
    ],
)
def test_run_flash_decoding(run, tmp_path, words, options, title):
    arrays = cache_arrays()
    np.savez(tmp_path / "in.npz", **arrays)
    status, out, _ = run("run", "flash_decoding", "--input", "in.npz", "--output", "out.npz", *words)
    assert status == 0, out
    with np.load(tmp_path / "out.npz") as written:
        assert sorted(written.files) == ["lse", "output"]
        output, lse = written["output"], written["lse"]
    expected = reference.flash_decoding(**arrays, **options)
    assert relative_error(output, expected.output) <= LIMITS["attention_float32"]
    assert (np.isneginf(lse) == np.isneginf(expected.lse)).all()
    there = np.isfinite(lse)
    assert lse[there] == pytest.approx(expected.lse[there], rel=1e-5)
    for line in (
        title,
        "query (3, 4, 8) float32",
        "caches (3, 2, 70, 8) float32",
        "mean length of a sequence 45.0 of 70",
        f"mean log-sum-exp {lse[there].astype(float).mean():.4f} nats",
        f"mean length of a result {np.linalg.norm(output[there].astype(float), axis=-1).mean():.4f}",
        "heads without a key 4 of 12 (33.3%)",
        "recorded events none",
    ):
        assert line in shown_lines(out), out


def test_run_flash_decoding_in_its_steps(run, tmp_path):
    """What the first step has written is what the second reads, and its result a state beside another."""
    arrays = cache_arrays()
    np.savez(tmp_path / "in.npz", **arrays)
    size = ("--chunk-size", 16)
    status, out, _ = run(
        "run", "flash_decoding_chunk", "--input", "in.npz", "--output", "parts.npz", *size, "--scale", 0.7
    )
    assert status == 0, out
    assert "flash_decoding_chunk, chunks of 16 → parts.npz" in shown_lines(out)
    assert "partials (3, 4, 5, 10) float32" in shown_lines(out)
    assert "chunks without a key 20 of 60 (33.3%)" in shown_lines(out)
    # The size of the chunks is in the file.
    status, out, _ = run("run", "flash_decoding_reduce", "--input", "parts.npz", "--output", "out.npz")
    assert status == 0, out
    assert "flash_decoding_reduce, chunks of 16 → out.npz" in shown_lines(out)
    assert "heads without a key 4 of 12 (33.3%)" in shown_lines(out)
    expected = reference.flash_decoding(**arrays, scale=0.7)
    with np.load(tmp_path / "out.npz") as written:
        output, lse = written["output"], written["lse"]
    assert relative_error(output, expected.output) <= LIMITS["attention_float32"]

    outs, lses = np.stack([output, 0 * output]), np.stack([lse, np.full_like(lse, 5)])
    np.savez(tmp_path / "states.npz", outs=outs, lses=lses)
    status, out, _ = run("run", "merge_attention_states", "--input", "states.npz", "--output", "merged.npz")
    assert status == 0, out
    merged = reference.merge_attention_states(outs, lses)
    with np.load(tmp_path / "merged.npz") as written:
        assert relative_error(written["output"], merged.output) <= LIMITS["float32"]
        assert written["lse"] == pytest.approx(merged.lse, rel=1e-6)
    largest = np.exp(lses.max(axis=0) - merged.lse).mean()
    for line in (
        "merge_attention_states → merged.npz",
        "outs (2, 3, 4, 8) float32",
        f"mean log-sum-exp {merged.lse.mean():.4f} nats",
        f"mean weight of the largest state {largest:.4f}",
        "rows of no state 0 of 12 (0.0%)",
    ):
        assert line in shown_lines(out), out


def test_the_chunk_size_of_partials(run, refused, tmp_path):
    """The one in the file, which may be said again but not another one; where there is none, what is given."""
    arrays = cache_arrays()
    size, files = ("--chunk-size", 16), ("--input", "parts.npz", "--output", "out.npz")
    np.savez(tmp_path / "in.npz", **arrays)
    assert run("run", "flash_decoding_chunk", "--input", "in.npz", "--output", "parts.npz", *size)[0] == 0
    assert run("run", "flash_decoding_reduce", *files, *size)[0] == 0
    line = refused("run", "flash_decoding_reduce", *files, "--chunk-size", 32)
    assert line.endswith("--chunk-size: parts.npz holds partials of chunks of 16 keys, got 32")

    held = dict(np.load(tmp_path / "parts.npz"))
    assert held["chunk_size"] == 16
    np.savez(tmp_path / "parts.npz", **{**held, "chunk_size": np.float32(16)})
    assert "parts.npz: chunk_size: expected one integer, got float32 ()" in refused(
        "run", "flash_decoding_reduce", *files
    )
    del held["chunk_size"]
    np.savez(tmp_path / "parts.npz", **held)
    for words, chunk_size in ((size, 16), ((), burt_numba.FLASH_DECODE_CHUNK_SIZE)):
        status, out, _ = run("run", "flash_decoding_reduce", *files, *words)
        assert status == 0
        assert f"flash_decoding_reduce, chunks of {chunk_size} → out.npz" in shown_lines(out)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_help_of_run_names_the_arrays(run, operation):
    out = " ".join(run("run", operation, "--help")[1].split())
    for name in (*FILES[operation].reads, *FILES[operation].optional, *FILES[operation].writes):
        assert f" {name} " in out


@pytest.mark.parametrize("change", [{"M": 0}, {"S": 0, "seq_lens": np.zeros(3, int)}])
def test_run_flash_decoding_on_nothing(run, tmp_path, change):
    np.savez(tmp_path / "in.npz", **cache_arrays(**change))
    assert run("run", "flash_decoding", "--input", "in.npz", "--output", "out.npz")[0] == 0
    assert run("run", "flash_decoding_chunk", "--input", "in.npz", "--output", "parts.npz")[0] == 0
    assert run("run", "flash_decoding_reduce", "--input", "parts.npz", "--output", "again.npz")[0] == 0
    for name in ("out.npz", "again.npz"):
        output = np.load(tmp_path / name)["output"]
        assert output.shape[1:] == (4, 8) and (output == 0).all()


def routing_arrays(T=40, d=6, E=4, k=2):
    """Arrays of a dispatch, by name: more tokens ask for a low expert than for a high one."""
    random = np.random.default_rng(0)
    return {
        "input": normal((T, d)),
        "routing_weights": random.random((T, E), np.float32),
        "top_k_indices": (random.random((T, k)) ** 2 * E).astype(np.int64),
    }


@pytest.mark.parametrize(("words", "options"), [((), {}), (("--expert-capacity", 9), {"expert_capacity": 9})])
def test_run_sparse_moe_dispatch(run, tmp_path, words, options):
    arrays = routing_arrays()
    np.savez(tmp_path / "in.npz", **arrays)
    status, out, _ = run("run", "sparse_moe_dispatch", "--input", "in.npz", "--output", "out.npz", *words)
    assert status == 0

    expected = reference.sparse_moe_dispatch(**arrays, **options)
    with np.load(tmp_path / "out.npz") as written:
        assert sorted(written.files) == ["combine_weights", "dispatch_indices", "expert_counts", "expert_inputs"]
        for name in written.files:
            assert np.array_equal(written[name], getattr(expected, name)), name
    counts, placed = expected.expert_counts, np.count_nonzero(expected.dispatch_indices[..., 0] >= 0)
    overflowed, dropped = expected.num_overflowed, expected.num_dropped
    shown = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        f"sparse_moe_dispatch, 4 experts of {expected.expert_inputs.shape[1]} rows → out.npz",
        "input (40, 6) float32",
        f"choices placed {placed} of 80 ({placed / 80:.1%})",
        f"tokens sent to expert 0 for want of room {overflowed} of 40 ({overflowed / 40:.1%})",
        f"tokens dropped {dropped} of 40 ({dropped / 40:.1%})",
        f"rows of an expert: least, mean, most {counts.min()}, {counts.mean():.1f}, {counts.max()}",
    ):
        assert line in shown, out
    assert (dropped > 0) == bool(words)
    assert ("CAPACITY_FULL (code 5)" in out) == bool(words)


def test_run_sparse_moe_dispatch_in_any_order(run, tmp_path):
    arrays = routing_arrays()
    np.savez(tmp_path / "in.npz", **arrays)
    words = ("--any-order", "--expert-capacity", "40")
    status, _, _ = run("run", "sparse_moe_dispatch", "--input", "in.npz", "--output", "out.npz", *words)
    assert status == 0
    expected = reference.sparse_moe_dispatch(**arrays, expert_capacity=40)
    written = np.load(tmp_path / "out.npz")
    assert np.array_equal(written["expert_counts"], expected.expert_counts)
    assert np.array_equal(written["combine_weights"], expected.combine_weights)


@pytest.mark.parametrize(("words", "renormalize"), [((), False), (("--renormalize",), True)])
def test_run_sparse_moe_combine(run, tmp_path, words, renormalize):
    """Of what a dispatch has written, with the tokens themselves as the experts' answers."""
    arrays = routing_arrays()
    np.savez(tmp_path / "in.npz", **arrays)
    full = ("--expert-capacity", "9")
    assert run("run", "sparse_moe_dispatch", "--input", "in.npz", "--output", "rows.npz", *full)[0] == 0
    with np.load(tmp_path / "rows.npz") as rows:
        np.savez(tmp_path / "back.npz", expert_outputs=rows["expert_inputs"], **rows)
    status, out, _ = run("run", "sparse_moe_combine", "--input", "back.npz", "--output", "out.npz", *words)
    assert status == 0
    dispatch = reference.sparse_moe_dispatch(**arrays, expert_capacity=9)
    expected = reference.sparse_moe_combine(dispatch.expert_inputs, dispatch, renormalize).output
    assert relative_error(np.load(tmp_path / "out.npz")["output"], expected) <= LIMITS["float32"]
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert f"sparse_moe_combine{', weights renormalised' * renormalize} → out.npz" in shown
    assert f"tokens of no row {dispatch.num_dropped} of 40 ({dispatch.num_dropped / 40:.1%})" in shown


def test_run_on_no_tokens(run, tmp_path):
    np.savez(tmp_path / "in.npz", **routing_arrays(T=0))
    assert run("run", "sparse_moe_dispatch", "--input", "in.npz", "--output", "rows.npz")[0] == 0
    with np.load(tmp_path / "rows.npz") as rows:
        assert rows["expert_counts"].tolist() == [0, 0, 0, 0]
        np.savez(tmp_path / "back.npz", expert_outputs=rows["expert_inputs"], **rows)
    assert run("run", "sparse_moe_combine", "--input", "back.npz", "--output", "out.npz")[0] == 0
    assert np.load(tmp_path / "out.npz")["output"].shape == (0, 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("constrained_softmax", "--input", "none.npz"), "none.npz: no such file"),
        (("constrained_softmax", "--input", "text.npz"), "text.npz: neither an .npz nor an .npy file"),
        (("constrained_softmax", "--input", "cut.npz"), "cut.npz: cannot be read (File is not a zip file)"),
        (("constrained_softmax", "--input", "objects.npy"), "objects.npy: cannot be read (Object arrays"),
        (("constrained_softmax", "--input", "empty.npz"), "holds no array named logits (it holds: nothing)"),
        (("attention_softmax", "--input", "two.npz"), "holds no array named scores (it holds: logits, labels)"),
        (("constrained_softmax", "--input", "two.npz"), "labels: expected shape (3,), one for each row of the logits"),
        (("constrained_softmax", "--input", "integers.npy"), "constrained_softmax: logits: "),
        (
            ("constrained_softmax", "--input", "good.npy", "--entropy-bound", "-1"),
            "constrained_softmax: entropy_bound: ",
        ),
        (("constrained_softmax", "--input", "good.npy", "--entropy-bound", "x"), "argument --entropy-bound: invalid"),
        (("constrained_softmax", "--input", "good.npy", "--causal"), "unrecognized arguments: --causal"),
        (("attention_softmax", "--input", "good.npy"), "attention_softmax: scores: "),
        (("attention_softmax", "--input", "scores.npy", "--causal"), "attention_softmax: causal_offset: "),
        (("attention_softmax", "--input", "scores.npy", "--causal-offset", "1"), "has no effect without --causal"),
        (("cifg_update", "--input", "two.npz"), "holds no array named C (it holds: logits, labels)"),
        (("cifg_update", "--input", "memory.npz"), "memory.npz: holds no array named x (it holds: C, h, W_f, b_f)"),
        (("batched_cifg_update", "--input", "memory.npz"), "holds no array named H (it holds: C, h, W_f, b_f)"),
        (("cifg_update", "--input", "good.npy"), "good.npy: holds no array named h (it holds: C)"),
        (("cifg_update", "--input", "update.npz"), "cifg_update: C: expected shape (3, 3), got "),
        (("cifg_update", "--input", "update.npz", "--spectral-bound", "0"), "cifg_update: spectral_bound: "),
        (("cifg_update", "--input", "update.npz", "--projection", "cut"), "argument --projection: invalid choice"),
        (("cifg_update", "--input", "update.npz", "--shared-memory-mode"), "unrecognized arguments: --shared"),
        (("sparse_moe_dispatch", "--input", "memory.npz"), "holds no array named input (it holds: C, h, W_f, b_f)"),
        (("sparse_moe_dispatch", "--input", "routing.npz"), "sparse_moe_dispatch: top_k_indices: expected int32 or"),
        (
            ("sparse_moe_dispatch", "--input", "routing.npz", "--expert-capacity", "-1"),
            "moe_dispatch: expert_capacity: ",
        ),
        (("biencoder_attention", "--input", "routing.npz"), "holds no array named query (it holds: "),
        (("biencoder_attention", "--input", "contexts.npz"), "biencoder_attention: context_keys: expected heads"),
        (("flash_decoding", "--input", "contexts.npz"), "holds no array named k_cache (it holds: "),
        (("flash_decoding", "--input", "caches.npz"), "flash_decoding: seq_lens: expected"),
        (("flash_decoding_chunk", "--input", "caches.npz", "--chunk-size", "0"), "flash_decoding_chunk: chunk_size: "),
        (("flash_decoding_reduce", "--input", "caches.npz"), "holds no array named partials (it holds: "),
        (("flash_decoding_reduce", "--input", "good.npy"), "good.npy: holds no array named seq_lens (it holds: "),
        (("merge_attention_states", "--input", "states.npz"), "merge_attention_states: lses: expected"),
        (("merge_attention_states", "--input", "states.npz", "--chunk-size", "8"), "unrecognized arguments: --chunk"),
        (("sparse_moe_combine", "--input", "routing.npz"), "holds no array named expert_outputs (it holds: input, "),
    ],
)
def test_run_refuses(refused, tmp_path, words, message):
    (tmp_path / "text.npz").write_text("logits")
    np.savez(tmp_path / "cut.npz", np.zeros((50, 50)))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:500])
    np.save(tmp_path / "objects.npy", np.array([None, {}]))
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "two.npz", logits=np.zeros((3, 4), np.float32), labels=np.zeros(2))
    np.save(tmp_path / "integers.npy", np.zeros((2, 5), np.int32))
    np.save(tmp_path / "good.npy", normal((3, 4)))
    np.save(tmp_path / "scores.npy", normal((1, 1, 2, 3)))
    update = {**memory_arrays(d=3), "C": np.zeros((3, 4), np.float32)}
    np.savez(tmp_path / "update.npz", **update)
    routing = routing_arrays()
    np.savez(tmp_path / "routing.npz", **{**routing, "top_k_indices": routing["top_k_indices"].astype(np.int16)})
    np.savez(tmp_path / "contexts.npz", **{**context_arrays(), "context_keys": np.zeros((2, 3, 20, 8), np.float32)})
    np.savez(tmp_path / "caches.npz", **cache_arrays(seq_lens=np.zeros(3, np.float32)))
    np.savez(tmp_path / "states.npz", outs=np.zeros((2, 3, 4), np.float32), lses=np.zeros((3, 2), np.float32))
    np.savez(tmp_path / "memory.npz", **{name: array for name, array in update.items() if name != "x"})
    assert message in refused("run", *words, "--output", "out.npz")
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.npy", "expected a name that ends in .npz"),
        ("none/out.npz", "no such folder: none"),
        ("in.npz", "would not overwrite in.npz"),
        ("folder.npz", "would not overwrite folder.npz"),
    ],
)
def test_run_refuses_an_output(refused, tmp_path, output, message):
    np.savez(tmp_path / "in.npz", logits=normal((3, 4)))
    (tmp_path / "folder.npz").mkdir()
    before = (tmp_path / "in.npz").read_bytes()
    assert message in refused("run", "constrained_softmax", "--input", "in.npz", "--output", output)
    assert (tmp_path / "in.npz").read_bytes() == before


def test_run_does_not_hide_a_fault_of_the_package(run, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(burt_numba, "constrained_softmax", broken, raising=False)
    np.save(tmp_path / "in.npy", normal((3, 4)))
    with pytest.raises(TypeError, match="unsupported operand"):
        run("run", "constrained_softmax", "--input", "in.npy", "--output", "out.npz")


# plan and bench ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "32", "--num-classes", "9", "64"), "unrecognized arguments: 64"),
        (
            ("--batch-size", "32", "--num-classes", "9", "--compute-capability", "9"),
            "expected MAJOR.MINOR as in 9.0, got 9",
        ),
        (("--batch-size", "32"), "the following arguments are required: --num-classes"),
        (("--batch-size", "32", "--num-classes", "10", "--num-heads", "3"), "unrecognized arguments: --num-heads 3"),
        (("--batch-size", "-3", "--num-classes", "10"), "constrained_softmax: --batch-size: expected"),
        (("--batch-size", "many", "--num-classes", "10"), "argument --batch-size: invalid int value: 'many'"),
        (("--batch-size", "3", "--num-classes", "10", "--dtype", "int8"), "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_plan_refuses(refused, words, message):
    assert message in refused("plan", "constrained_softmax", *words)


@pytest.mark.parametrize(
    ("operation", "dims"),
    [
        ("constrained_softmax", {"batch_size": 32, "num_classes": 50_000}),
        ("attention_softmax", {"batch_size": 2, "num_heads": 8, "seq_len": 512, "causal": True}),
        (
            "biencoder_attention",
            {"batch_size": 2, "num_heads": 8, "query_len": 512, "context_len": 64, "d_head": 64, "precision": "tf32"},
        ),
        ("cifg_update", {"d_model": 512, "input_dim": 1024, "multiprocessors": 68}),
        ("batched_cifg_update", {"batch_size": 2, "d_model": 5, "input_dim": 6, "shared_memory_mode": True}),
        ("sparse_moe_dispatch", {"batch_size": 1024, "d_model": 512, "num_experts": 4, "expert_capacity": 700}),
        ("sparse_moe_combine", {"batch_size": 1024, "d_model": 512, "num_experts": 4, "top_k": 3}),
        ("flash_decoding", {"batch_size": 8, "num_heads": 32, "key_heads": 8, "seq_len": 4096, "d_head": 128}),
        ("flash_decoding_chunk", {"batch_size": 1, "num_heads": 8, "seq_len": 100, "d_head": 64, "chunk_size": 16}),
        ("flash_decoding_reduce", {"batch_size": 64, "num_heads": 32, "max_chunks": 128, "d_head": 128}),
        ("merge_attention_states", {"num_states": 2, "batch_size": 64, "d_head": 128, "dtype": "float16"}),
    ],
)
def test_plan(run, operation, dims):
    words = [
        word
        for name, value in dims.items()
        for word in (f"--{name.replace('_', '-')}", value)
        if value is not True or word is not value
    ]
    status, out, err = run("plan", operation, *words)
    assert (status, err) == (0, "")
    planned, about = out.split("\n\n")
    assert planned == str(burt_numba.plan(operation, **dims))
    assert about.startswith("For a device of compute capability 9.0")
    assert ("documented: " in about) == ("documented " in planned)
    assert "launched: " in about


def test_plan_for_another_device(run):
    words = ("--d-model", 512, "--input-dim", 1024, "--compute-capability", "8.6", "--multiprocessors", 68)
    status, out, _ = run("plan", "cifg_update", *words)
    assert status == 0
    planned = burt_numba.plan("cifg_update", d_model=512, input_dim=1024, compute_capability=(8, 6), multiprocessors=68)
    assert out.startswith(f"{planned}\n\nFor a device of compute capability 8.6 with 68 multiprocessors; ")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_size_of_a_plan_reaches_it(run, operation):
    """What the command line offers is what the function takes."""
    required, optional = plan_module._REQUIRED[operation], plan_module._OPTIONAL[operation]
    sizes = [word for name in required for word in (f"--{name.replace('_', '-')}", 8)]
    assert run("plan", operation, *sizes)[0] == 0
    for name in required:
        with pytest.raises(ValueError, match=f"{name} is missing"):
            burt_numba.plan(operation, **dict.fromkeys(required.keys() - {name}, 8))
    values = {"dtype": "float16", "precision": "tf32", **dict.fromkeys(plan_module._SWITCHES, True)}
    given = {name: values.get(name, 8) for name in optional}
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
    if given.get("precision") == "tf32":
        del given["dtype"]
        words = [word for word in words if "dtype" not in word]
    status, out, err = run("plan", operation, *sizes, *words)
    assert status == 0, err
    assert out.startswith(str(burt_numba.plan(operation, **dict.fromkeys(required, 8), **given)))


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("--batch-size", "32", "--help")])
def test_help_of_plan_behind_an_operation(run, words):
    status, out, _ = run("plan", "constrained_softmax", *words)
    assert status == 0 and out.startswith("usage: burt-numba plan") and "--batch-size" in out


def test_bench_outside_a_checkout(refused, monkeypatch):
    monkeypatch.setattr("burt_numba.cli.bench.burt_numba.__file__", "/nowhere/burt_numba/__init__.py")
    assert "benchmarks run from a checkout" in refused("bench")


def test_bench_without_a_gpu(refused, machine, monkeypatch):
    monkeypatch.setattr("burt_numba.cli.bench._checkout", lambda: ROOT)
    machine(0, None)
    assert "no CUDA device found" in refused("bench", "--op", "constrained_softmax")


def test_bench_hands_over_to_the_runner(run, machine, monkeypatch):
    calls = []

    def record(command, **options):
        calls.append((command, options["cwd"]))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr("burt_numba.cli.bench._checkout", lambda: ROOT)
    monkeypatch.setattr("burt_numba.cli.bench.subprocess.run", record)
    machine(1, None)
    assert run("bench", "--op", "attention_softmax")[0] == 3
    assert calls == [([sys.executable, "-m", "perf", "--op", "attention_softmax"], ROOT)]
