"""The resource check: what ptxas prints, what is allowed, and a check of nothing."""

import pytest


def test_resources_reads_what_ptxas_prints():
    from perf.resources import parse_ptxas

    report = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'kernel' for 'sm_90'\n"
        "ptxas info    : Function properties for kernel\n"
        "    320 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 96 registers, used 1 barriers, 320 bytes cumulative stack size, 128 bytes smem\n"
        "ptxas info    : Function properties for helper\n"
        "    16 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads\n"
    )
    assert parse_ptxas(report) == (96, 24, 336, 128)
    with pytest.raises(ValueError, match="no registers: it printed nothing"):
        parse_ptxas("")


@pytest.mark.parametrize(
    ("allowed", "excess"),
    [
        ({}, "24 bytes of spills, 0 allowed; 64 bytes of local memory, 0 allowed"),
        (
            {"other": {"spill_bytes": 99, "stack_bytes": 99}},
            "24 bytes of spills, 0 allowed; 64 bytes of local memory, 0",
        ),
        ({"kernel": {"spill_bytes": 24, "stack_bytes": 63}}, "64 bytes of local memory, 63 allowed"),
        ({"kernel": {"spill_bytes": 24, "stack_bytes": 64}}, None),
        ({"9.0 kernel[8x1]": {"spill_bytes": 24, "stack_bytes": 64}}, None),
        ({"8.0 kernel[8x1]": {"spill_bytes": 24, "stack_bytes": 64}}, "24 bytes of spills, 0 allowed"),
        ({"9.0 kernel[4x1]": {"spill_bytes": 24, "stack_bytes": 64}}, "24 bytes of spills, 0 allowed"),
    ],
)
def test_resources_beyond_what_is_allowed(allowed, excess):
    from perf.resources import Resources

    used = Resources(
        (9, 0), "kernel", "kernel[8x1](f4:1C)", registers=96, spill_bytes=24, stack_bytes=64, shared_bytes=128
    )
    found = used.excess(allowed)
    assert (found or "").startswith(excess or "")
    assert (found is None) is (excess is None)


def test_resources_fails_without_kernels(monkeypatch, capsys):
    from perf import resources

    monkeypatch.setattr(resources, "find_ptxas", lambda: "ptxas")
    monkeypatch.setattr(resources, "measure", lambda capabilities, ptxas: ([], []))
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert resources.main(["--capability", "9.0"]) == 1
    assert "no kernels to compile" in capsys.readouterr().out
