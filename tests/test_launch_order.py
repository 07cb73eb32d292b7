"""Launches that begin before the one before them is complete, and arguments that are addresses alone."""

import pytest
from cifg_support import MODES, call, forget_calls
from moe_support import call_dispatch, output_contents, random_routing
from support import to_target
from test_coherence import COMPILER
from test_compiling import assert_compiled

from burt_numba import moe
from burt_numba.host import operation
from burt_numba.host.launching import Array, Errors, Number, bare
from burt_numba.target import can_overlap_launches


@pytest.fixture
def launches(monkeypatch):
    """The launches of calls of a kind that is new."""
    seen = []
    prepare = operation.prepare
    monkeypatch.setattr(operation, "prepare", lambda launch, device: (seen.append(launch), prepare(launch, device))[1])
    forget_calls(monkeypatch)
    monkeypatch.setattr(moe._DISPATCH_OPERATION, "_calls", {})
    return seen


WAITING = {"cifg_writes", "cifg_update_rows", "cifg_spectrum"}
"""Kernels that wait for the launch before, all of them after the first of a call."""
LETTING = {"cifg_gate", "cifg_gates", "cifg_writes", "cifg_update_rows"}
"""Those that let the next launch begin: all but the last, since what the caller launches next knows of no waiting."""


@pytest.mark.parametrize("shared", MODES, ids=["single", "batched", "shared"])
def test_the_first_launch_follows_none(shared, launches):
    """It may not begin before what the caller has launched, nor may the check before the projection is complete."""
    call([to_target(array.copy()) for array in MODES[shared]], shared=shared, validate_output=True)
    assert [launch.follows for launch in launches] == [False, *[True] * (len(launches) - 2), False]
    assert all(launch.kernel.name in WAITING for launch in launches[1:])
    assert launches[0].kernel.name not in WAITING


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_only_the_copies_of_a_dispatch_follow(deterministic, given, launches):
    """What gives out rows may not begin before what the caller has launched, nor may the check before the copies."""
    routing = random_routing(9, 4, 3, 2)
    outputs = {name: to_target(content) for name, content in output_contents(routing, 9).items()} if given else {}
    call_dispatch(routing, 9, deterministic=deterministic, validate_output=True, **outputs)
    following = [launch.kernel.name for launch in launches if launch.follows]
    assert following == ["moe_copy"] * (deterministic or not given)
    assert [launch.follows for launch in launches[:1] + launches[-1:]] == [False, False]


def test_devices_that_overlap_launches():
    overlapping = [capability for capability in ((7, 5), (8, 9), (9, 0), (12, 0)) if can_overlap_launches(capability)]
    assert overlapping == [(9, 0), (12, 0)]


def test_bare_arguments():
    array, number = Array(2, "i8", (5,), offset=16), Number(3, "i4")
    errors = Errors()
    changed, same, unchanged = bare((array, number, errors))
    assert (changed.type, changed.operand, changed.offset) == ("i8*", 2, 16)
    assert (array.type, same, unchanged) == ("i8:1C", number, errors)


# What the compiler makes of them --------------------------------------------------------------------------------------

CONTROLS = """
import importlib
kernels = {}
for kernel, names in importlib.import_module(f"burt_numba.{FAMILY}").specialisations():
    kernels.setdefault(kernel.name, (kernel, names))
for name, (kernel, names) in kernels.items():
    old, new = compiling.compile_specialisation(kernel, names, ((8, 0), (9, 0)))
    assert "griddepcontrol" not in old and "__nvvm_reflect" not in new, name
    # Before it reads what another launch wrote, once on each way: of a block that does not wait, nobody knows.
    assert new.count("griddepcontrol.wait") == WAITS.get(name, 0), name
    assert new.count("griddepcontrol.launch_dependents") == (name in LETTING), name
print("done")
"""

BARE = """
from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at

@cuda.jit
def kernel(source, out):
    source = array_at(source)
    out = array_at(out)
    if source.size > 0:
        out[1] = source[5] + source[2:9][1]

spec = compiling.KernelSpec("bare", lambda: kernel, (), (128, 1)), ("f4*", "f4*")
assert len(accesses(".param", *spec)) == 2, accesses(".param", *spec)
assert len(accesses("ld.global.f32", *spec)) == 2 and len(accesses("st.global.f32", *spec)) == 1
assert len(accesses("setp.eq.s64", *spec)) == 1  # nothing is read where there is no pointer
print("done")
"""


@pytest.mark.parametrize(
    ("family", "waits", "letting"),
    [
        ("cifg", dict.fromkeys(WAITING, 1), LETTING),
        # Some blocks copy, the others clear.
        ("moe", {"moe_copy": 2}, {"moe_positions"}),
    ],
)
def test_controls_that_are_compiled(monkeypatch, tmp_path, family, waits, letting):
    given = f"FAMILY, WAITS, LETTING = {family!r}, {waits}, {letting}\n"
    assert_compiled(COMPILER + given + CONTROLS, monkeypatch, tmp_path)


def test_bare_arguments_that_are_compiled(monkeypatch, tmp_path):
    assert_compiled(COMPILER + BARE, monkeypatch, tmp_path)
