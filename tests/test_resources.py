"""The resource check: what ptxas prints, what is allowed, and a check of nothing."""

from types import SimpleNamespace

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


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("other", [None, (8, 6), (9, 0)])
def test_resources_asks_once_for_the_same_ptx(monkeypatch, sampled, asks, other):
    from burt_numba import backend
    from perf.resources import _sources

    asked = []

    def to_ptx(library, capabilities):
        asked.extend(capabilities)
        return [f".target sm_{a}{b}\n{'other' * ((a, b) == other)}" for a, b in capabilities]

    monkeypatch.setattr(backend, "to_ptx", to_ptx)
    library = SimpleNamespace(llvm_strs=["define", "call @__nvvm_reflect" if asks else "call"])
    capabilities = ((7, 5), (8, 0), (8, 6), (9, 0), (12, 0))
    same = {(8, 6)} if asks else {(7, 5), (8, 6), (9, 0)}
    if sampled and other in same:
        with pytest.raises(ValueError, match=r"the PTX for [89]\.[06] is not that for 8\.0"):
            _sources(library, capabilities, sampled)
    else:
        sources = _sources(library, capabilities, sampled)
        unlike = other if other not in same else None
        assert sources == {(a, b): f".target sm_{a}{b}\n{'other' * ((a, b) == unlike)}" for a, b in capabilities}
    assert asked == [c for c in capabilities if sampled or c not in same]


# What Numba writes, in short: a kernel that calls two functions and has an array in shared memory.
_MODULES = (
    '; ModuleID = "kernel$8"\n@"_cudapy_smem_3" = addrspace(3) global\ndefine void @"_ZN6kernelB2v8B2q7Ef"()\n'
    '  call i32 @"_ZN3oneB2v9B2q7Ef"()\n  call i32 @"_ZN5otherB3v10B2q7Ef"()\n',
    '; ModuleID = "one$9"\ndefine i32 @"_ZN3oneB2v9B2q7Ef"()\n  add\n',
    '; ModuleID = "other$10"\ndefine i32 @"_ZN5otherB3v10B2q7Ef"()\n  sub\n  call float @"__nv_expf"()\n',
)


def _renamed(module):
    """As in a process that has lowered other kernels before, for another capability."""
    names = (("v8B2q7", "v48B2p6"), ("v9B2q7", "v49B2p6"), ("v10B2q7", "v7B2p6"), ("smem_3", "smem_5"), ("$", "$1"))
    for name, another in names:
        module = module.replace(name, another)
    return module


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("", "", True),
        ("expf", "logf", False),
        ("sub", "mul", False),
        ("smem_5", "other", False),
        # The two functions change places.
        ('call i32 @"_ZN3oneB2v49B2p6Ef"()\n  call i32 @"_ZN5otherB3v7B2p6Ef"()', None, False),
    ],
)
def test_lowered_compares_but_for_names(old, new, same):
    from perf.lowered import canonical

    if new is None:
        new = "\n  ".join(reversed(old.split("\n  ")))
    kernel, one, other = map(_renamed, _MODULES)
    assert old in kernel + one + other
    changed = [module.replace(old, new) for module in (kernel, other, one)]
    assert (canonical(changed) == canonical(_MODULES)) is same


def test_lowered_refuses_a_module_that_nothing_calls():
    from perf.lowered import canonical

    with pytest.raises(ValueError, match="1 of 4 modules are called by none"):
        canonical([*_MODULES, 'define i32 @"_ZN5third"()'])


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("differs", [True, False])
def test_resources_lowers_once_and_a_sample_again(monkeypatch, tmp_path, sampled, differs):
    from burt_numba.host import compiling
    from perf.resources import _lowered

    lowered = []

    def lower_specialisation(kernel, types, capability):
        lowered.append(capability)
        return SimpleNamespace(
            llvm_strs=[m.replace("sub", "mul" * differs * (len(lowered) - 1) or "sub") for m in _MODULES]
        )

    monkeypatch.setattr(compiling, "lower_specialisation", lower_specialisation)

    def specialisation(*constants):
        kernel = compiling.KernelSpec("kernel", list, constants)
        return compiling.Specialisation(kernel, ("f4",), (9, 0))

    folder = tmp_path / "lowered"
    first = _lowered(specialisation(1), (7, 5), folder, True)
    if sampled and differs:
        with pytest.raises(ValueError, match="lowered holds other LLVM IR than comes of lowering it here"):
            _lowered(specialisation(1), (7, 0), folder, sampled)
    else:
        assert _lowered(specialisation(1), (7, 0), folder, sampled) == first
    assert lowered == [(7, 5), (7, 0)][: 1 + sampled]
    # Another one is not there, and without a folder nothing is.
    _lowered(specialisation(2), (7, 0), folder, False)
    _lowered(specialisation(1), (7, 0), None, False)
    assert len(lowered) == 3 + sampled
    assert len(list(folder.iterdir())) == 2


def test_resources_fails_without_kernels(monkeypatch, capsys):
    from perf import resources

    monkeypatch.setattr(resources, "find_ptxas", lambda: "ptxas")
    monkeypatch.setattr(resources, "measure", lambda capabilities, ptxas, folder: ([], []))
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert resources.main(["--capability", "9.0"]) == 1
    assert "no kernels to compile" in capsys.readouterr().out
