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


_LOCAL_ARRAY = """.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 out)
{
    .local .align 4 .b8 array[64];
    .reg .b32 %place, %value;
    .reg .b64 %address, %out;
    mov.u32 %place, %tid.x;
    mul.wide.u32 %address, %place, 4;
    mov.u64 %out, array;
    add.u64 %address, %address, %out;
    st.local.u32 [array], %place;
    st.local.u32 [array+4], %place;
    ld.local.u32 %value, [%address];
    ld.param.u64 %out, [out];
    st.global.u32 [%out], %value;
    ret;
}
"""


def test_resources_reports_local_memory():
    from perf.resources import Resources, assemble, find_ptxas, parse_ptxas, retarget

    try:
        ptxas = find_ptxas()
    except SystemExit as error:
        pytest.skip(str(error))
    ptx = retarget(_LOCAL_ARRAY, (8, 6))
    used = Resources((8, 6), "kernel", "kernel[]()", *parse_ptxas(assemble(ptxas, ptx, (8, 6))))
    assert used.excess({}) == "64 bytes of local memory, 0 allowed"
    with pytest.raises(ValueError, match="the PTX is for sm_86, expected sm_80"):
        assemble(ptxas, ptx, (8, 0))


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("differs", [True, False])
def test_resources_asks_once_for_the_same_ptx(monkeypatch, sampled, differs):
    from types import SimpleNamespace

    from burt_numba.host import compiling
    from perf.resources import _sources

    asked = []

    def compile_specialisation(kernel, types, capabilities):
        asked.extend(capabilities)
        return [f".target sm_{a}{b}\n{'other' * (differs and (a, b) == (8, 6))}" for a, b in capabilities]

    monkeypatch.setattr(compiling, "compile_specialisation", compile_specialisation)
    specialisation = SimpleNamespace(kernel=None, types=())
    capabilities = ((7, 5), (8, 0), (8, 6), (12, 0))
    if sampled and differs:
        with pytest.raises(ValueError, match=r"the PTX for 8\.6 is not that for 8\.0"):
            _sources(specialisation, capabilities, sampled)
    else:
        sources = _sources(specialisation, capabilities, sampled)
        assert sources == {(a, b): f".target sm_{a}{b}\n" for a, b in capabilities}
    assert asked == [c for c in capabilities if sampled or c != (8, 6)]


def test_resources_fails_without_kernels(monkeypatch, capsys):
    from perf import resources

    monkeypatch.setattr(resources, "find_ptxas", lambda: "ptxas")
    monkeypatch.setattr(resources, "measure", lambda capabilities, ptxas: ([], []))
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert resources.main(["--capability", "9.0"]) == 1
    assert "no kernels to compile" in capsys.readouterr().out
