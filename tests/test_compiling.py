"""From kernels to machine code without a GPU: the disk cache, the compiler, and what the sources may not contain."""

import ast
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import ON_GPU

import burt_numba
from burt_numba.host import compiling
from burt_numba.host.compiling import KernelSpec, Specialisation

PACKAGE = Path(burt_numba.__file__).parent
ROOT = PACKAGE.parent


def run_python(script, *, simulated=False):
    """A Python process of its own, by default with Numba for devices."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    if simulated:
        environment["NUMBA_ENABLE_CUDASIM"] = "1"
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# The disk cache ------------------------------------------------------------------------------------------------------

PTX = "// no real one\n.visible .entry kernel_name(\n)"
CODE = b"\x7fELF machine code\n of \x00 several lines"


def specialisation(name="fake", constants=(1, 2), bounds=(128, 8), types=("f4:1C", "i4"), capability=(9, 0)):
    return Specialisation(KernelSpec(name, lambda *constants: constants, constants, bounds), types, capability)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and a compiler that counts how often it is asked."""
    asked = []

    def linker(code, options):
        assert (code, options) == (PTX.encode(), "sm_90")
        return SimpleNamespace(link=lambda kind: SimpleNamespace(code=CODE))

    objects = SimpleNamespace(from_ptx=lambda ptx: ptx)
    stub = SimpleNamespace(Linker=linker, LinkerOptions=lambda arch: arch, ObjectCode=objects)
    monkeypatch.setitem(sys.modules, "cuda.core", stub)
    monkeypatch.setattr(Specialisation, "ptx", lambda self: asked.append(self) or PTX)
    folder = tmp_path / "a folder" / "cache"
    monkeypatch.setenv("BURT_NUMBA_CACHE_DIR", str(folder))
    return SimpleNamespace(folder=folder, asked=asked)


def test_the_second_process_compiles_nothing(cache):
    for _ in range(2):
        assert compiling.machine_code(specialisation()) == ("kernel_name", CODE)
    assert [entry.key for entry in cache.asked] == ["fake[1x2](f4:1C,i4)"]
    (file,) = cache.folder.iterdir()
    assert file.name.startswith("fake-") and file.suffix == ".cubin"


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("BURT_NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert compiling.cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("BURT_NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiling.cache_folder() == tmp_path / "xdg" / "burt_numba"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiling.cache_folder() == tmp_path / "home" / ".cache" / "burt_numba"


def test_a_user_without_a_home_still_compiles(cache, monkeypatch):
    monkeypatch.delenv("BURT_NUMBA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compiling.Path, "home", no_home)
    assert compiling.machine_code(specialisation()) == ("kernel_name", CODE)


@pytest.mark.parametrize(
    "other",
    [
        {"name": "other"},
        {"constants": (1, 3)},
        {"constants": (12,)},
        {"bounds": (128, 4)},
        {"types": ("f2:1C", "i4")},
        {"types": ("f4:1A", "i4")},
        {"capability": (8, 0)},
    ],
)
def test_the_key_depends_on_the_kernel(other):
    assert compiling._cache_file(specialisation(**other)) != compiling._cache_file(specialisation())


@pytest.fixture
def environment_key():
    """The key of sources and versions, worked out anew each time."""

    def key():
        compiling._environment_key.cache_clear()
        return compiling._environment_key()

    yield key
    compiling._environment_key.cache_clear()


@pytest.mark.parametrize("extra", ["cu12", "cu13"])
def test_the_key_depends_on_the_versions(monkeypatch, environment_key, extra):
    """Stale kernels survived an upgrade of numba-cuda: NVIDIA/numba-cuda#800.

    CUDA 12's parts have names of their own: its compiler library comes with nvidia-cuda-nvcc-cu12.
    """
    compiler = {"cu12": ["nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"], "cu13": ["nvidia-nvvm", "nvidia-nvjitlink"]}
    installed = dict.fromkeys(["numba", "numba-cuda", "llvmlite", "cuda-core", *compiler[extra]], "1.0")

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compiling.metadata, "version", version)
    before = environment_key()
    assert environment_key() == before
    unseen = []
    for name in list(installed):
        installed[name] = "1.1"
        if environment_key() == before:
            unseen.append(name)
        installed[name] = "1.0"
    assert not unseen
    del installed["cuda-core"]
    assert environment_key() != before


def test_the_key_depends_on_every_source(monkeypatch, environment_key, tmp_path):
    """Numba's own cache looks at the kernel's file alone; a device function elsewhere is part of the kernel too."""
    (tmp_path / "host").mkdir()
    (tmp_path / "device").mkdir()
    sources = [tmp_path / "host" / "compiling.py", tmp_path / "device" / "warp.py", tmp_path / "kernel.py"]
    for source in sources:
        source.write_text("x = 1\n")
    monkeypatch.setattr(compiling, "__file__", str(sources[0]))
    keys = [environment_key()]
    for source in sources:
        source.write_text("x = 2\n")
        keys.append(environment_key())
    sources[2].rename(tmp_path / "renamed.py")
    keys.append(environment_key())
    assert len(set(keys)) == len(keys)


def test_a_damaged_file_counts_as_missing(cache):
    compiling.machine_code(specialisation())
    (file,) = cache.folder.iterdir()
    content = file.read_bytes()
    damaged = [b"", b"\n", content[:-1], content[:20], content + b"x", b"\xff" * 40, b"name hash\n" + CODE]
    for place in range(len(content)):
        damaged += [content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :] for bit in (0x80, 1)]
    used = []
    for wrong in damaged:
        file.write_bytes(wrong)
        cache.asked.clear()
        try:
            found = compiling.machine_code(specialisation())
        except Exception as failure:
            found = failure
        if found != ("kernel_name", CODE) or len(cache.asked) != 1 or file.read_bytes() != content:
            used.append((wrong[:24], found))
    assert not used


@pytest.mark.parametrize("in_place_of", ["folder", "file"])
def test_a_cache_that_cannot_be_used_is_not_fatal(cache, in_place_of):
    if in_place_of == "folder":
        cache.folder.parent.write_text("a file where the folder should be")
    else:
        compiling._cache_file(specialisation()).mkdir(parents=True)
    for _ in range(2):
        assert compiling.machine_code(specialisation()) == ("kernel_name", CODE)
    assert len(cache.asked) == 2


def test_other_processes_see_the_whole_file_or_none(cache, monkeypatch):
    """The file appears under its name in one step, once it is complete; a failure leaves nothing behind."""
    replace = os.replace

    def watched(source, target):
        assert Path(source).parent == cache.folder and not Path(target).exists()
        assert Path(source).read_bytes().endswith(CODE)
        replace(source, target)

    def failing(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiling.os, "replace", watched)
    compiling.machine_code(specialisation())
    monkeypatch.setattr(compiling.os, "replace", failing)
    assert compiling.machine_code(specialisation("other")) == ("kernel_name", CODE)
    assert list(cache.folder.iterdir()) == [compiling._cache_file(specialisation())]


# Kernels and their types ---------------------------------------------------------------------------------------------


def test_kernel_spec():
    built = []
    spec = KernelSpec("name", lambda *constants: built.append(constants) or "kernel", (4, 8), (128, 2))
    assert spec.dispatcher == "kernel" and built == [(4, 8)]
    assert spec.runs_on((7, 0)) and not spec.runs_on((6, 1))
    later = KernelSpec("name", spec.build, lowest_capability=(8, 0))
    assert later.runs_on((8, 0)) and later.runs_on((12, 0)) and not later.runs_on((7, 5))
    # Built by another function object, but the same kernel.
    same = KernelSpec("name", lambda *constants: None, (4, 8), (128, 2))
    assert spec == same and hash(spec) == hash(same)
    for other in (("other", (4, 8), (128, 2)), ("name", (4, 9), (128, 2)), ("name", (4, 8), None)):
        assert spec != KernelSpec(other[0], spec.build, *other[1:])


def test_every_specialisation_has_a_key_of_its_own():
    for capability in ((7, 5), (8, 9), (9, 0)):
        found = list(compiling.all_specialisations(capability))
        assert len({compiling._cache_file(entry) for entry in found}) == len(set(found)) > 40
        assert all(entry.kernel.runs_on(capability) and capability == entry.capability for entry in found)


COMPILE = """
from burt_numba.host import compiling
from burt_numba.validation import validation_specialisations
try:
    from cuda.pathfinder import load_nvidia_dynamic_lib
    for library in ("nvvm", "nvJitLink"):
        load_nvidia_dynamic_lib(library)
except Exception as missing:
    print("skip:", missing)
    raise SystemExit
from numba.cuda import types
names = ("f4", "f2", "i4", "i8", "f4:1C", "f2:2A", "u1:3C", "i8:1C")
array = types.Array
assert compiling._numba_signature(names) == types.void(
    types.float32, types.float16, types.int32, types.int64,
    array(types.float32, 1, "C"), array(types.float16, 2, "A"), array(types.uint8, 3, "C"), array(types.int64, 1, "C"),
)
kernel, names = next(iter(validation_specialisations()))
for capability in ((7, 5), (9, 0)):
    specialisation = compiling.Specialisation(kernel, names, capability)
    ptx = specialisation.ptx()
    assert f".target sm_{capability[0]}{capability[1]}" in ptx, ptx[:500]
    assert ptx.count(".visible .entry") == 1 and f".maxntid {kernel.launch_bounds[0]}" in ptx
    assert f".minnctapersm {kernel.launch_bounds[1]}" in ptx
entry, code = compiling.machine_code(specialisation)
assert "distribution_check_kernel" in entry and code[:4] == bytes([127]) + b"ELF"
compiling.Specialisation.ptx = None
assert compiling.machine_code(specialisation) == (entry, code)
print("done")
"""


def assert_compiled(script, monkeypatch, tmp_path):
    """Run a script that compiles, into an empty cache; it prints "skip: .." without a compiler, and "done"."""
    monkeypatch.setenv("BURT_NUMBA_CACHE_DIR", str(tmp_path))
    done = run_python(script)
    if done.stdout.startswith("skip:"):
        pytest.skip(f"no compiler: neither of the extras cu12 and cu13 is installed ({done.stdout[6:200].strip()})")
    assert (done.stdout.strip(), done.returncode) == ("done", 0), done.stderr


def test_compiles_without_a_gpu(monkeypatch, tmp_path):
    assert_compiled(COMPILE, monkeypatch, tmp_path)


# Versions and targets that do not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("simulated", [False, True])
def test_refuses_a_numpy_that_numba_cuda_does_not_know(simulated):
    """NumPy 2.5 removed row_stack, and every kernel launch failed: NVIDIA/numba-cuda#907, #916."""
    use = "burt_numba.constrained_softmax(numpy.float32([1, 2]))" if simulated else "burt_numba.kernels"
    script = "import numpy; vars(numpy).pop('row_stack'); import burt_numba\n"
    script += f"try: {use}\nexcept ImportError as refused: print(refused)"
    done = run_python(script, simulated=simulated)
    assert done.stdout.strip() == (
        f"burt_numba: NumPy {np.__version__} has no numpy.row_stack, which numba-cuda "
        f"{metadata.version('numba-cuda')} needs; install 'numpy<2.5'"
    ), done.stderr


def test_refuses_a_target_that_was_chosen_too_late():
    script = "import os; from numba import cuda; os.environ['NUMBA_ENABLE_CUDASIM'] = '1'\n"
    script += "try: import burt_numba.backend\nexcept ImportError as refused: print(refused)"
    assert "NUMBA_ENABLE_CUDASIM was changed after" in run_python(script).stdout


@pytest.mark.skipif(ON_GPU, reason="this machine has a device")
def test_says_what_to_do_without_a_device():
    script = "import numpy, burt_numba\n"
    script += "try: burt_numba.constrained_softmax(numpy.zeros((2, 3), numpy.float32))\n"
    script += "except RuntimeError as refused: print(refused)"
    done = run_python(script)
    assert "no CUDA device" in done.stdout and "NUMBA_ENABLE_CUDASIM=1" in done.stdout, done.stderr


# What the sources may not contain ------------------------------------------------------------------------------------

TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
DEVICE = {name: tree for name, tree in TREES.items() if name.startswith(("kernels/", "device/"))}


def nodes_of(tree, *kinds):
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def test_no_fast_math():
    """Fast math assumes that there is no NaN and no Inf, and checks vanish: numba/numba#8708, #2919, #6217."""
    for name, tree in TREES.items():
        assert not [node.value.lineno for node in nodes_of(tree, ast.keyword) if node.arg == "fastmath"], name
        constants = {node.value for node in nodes_of(tree, ast.Constant) if isinstance(node.value, str)}
        assert not constants & {"fastmath", "fast", "nnan", "ninf", "nsz", "arcp"}, name


ALLOWED_IMPORTS = {
    "numba.cuda.extending": "device/",
    "numba.cuda.cudadrv.devicearray": "host/arrays.py",
    "numba.core": "host/arrays.py",
}


def test_numba_is_imported_in_one_place():
    """Another backend can follow where one module is all that knows this one."""
    for name, tree in TREES.items():
        modules = [node.module or "" for node in nodes_of(tree, ast.ImportFrom)]
        modules += [alias.name for node in nodes_of(tree, ast.Import) for alias in node.names]
        for module in modules:
            if module.split(".")[0] == "numba" and name not in ("backend.py", "simulator/numba_bridge.py"):
                assert name.startswith(ALLOWED_IMPORTS.get(module, "nowhere")), f"{name}: {module}"


# Every thread of a block, a warp or a cluster must come to these; the last three are fields of RowReductions.
WAITS = {"syncthreads", "syncwarp", "cluster_barrier", "warps_barrier", "shfl_sync", "shfl_xor_sync", "any_sync"}
WAITS |= {".maximum", ".sum", ".sum3"}


def device_functions(tree):
    functions = nodes_of(tree, ast.FunctionDef)
    return [f for f in functions if any("cuda.jit" in ast.unparse(decorator) for decorator in f.decorator_list)]


def names_of(node):
    return {node.attr, f".{node.attr}"} if isinstance(node, ast.Attribute) else {getattr(node, "id", None)}


def waits_in(node, known):
    return [call for call in nodes_of(node, ast.Call) if names_of(call.func) & known]


def waiting_functions(trees):
    """By file, the names of functions that wait for other threads, by themselves or through what they call or get."""
    known, before = {name: set(WAITS) for name in trees}, None
    while before != (before := sum(map(len, known.values()))):
        for name, tree in trees.items():
            inside = {id(node) for function in device_functions(tree) for node in ast.walk(function)}
            found = {f.name for f in nodes_of(tree, ast.FunctionDef) if waits_in(f, known[name])}
            for node in nodes_of(tree, ast.Assign):
                values = getattr(node.value, "elts", [node.value]) if id(node) not in inside else []
                for target, value in zip(getattr(node.targets[0], "elts", node.targets), values, strict=False):
                    given = [part for call in nodes_of(value, ast.Call) for part in (call.func, *call.args)]
                    if any(names_of(part) & known[name] for part in (value, *given)):
                        found |= names_of(target)
            known[name] |= found
            shared = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} & found
            for other in known.values():
                other |= shared
    return known


def early_exits(tree, known):
    """Lines on which a thread may leave though others of its block will wait for it."""
    lines = []
    for function in device_functions(tree):
        last = max((call.lineno for call in waits_in(function, known)), default=0)
        lines += [node.lineno for node in nodes_of(function, ast.Return, ast.Continue) if node.end_lineno < last]
        for loop in nodes_of(function, ast.For, ast.While):
            lines += [node.lineno for node in nodes_of(loop, ast.Return, ast.Continue) if waits_in(loop, known)]
    return lines


def test_no_thread_leaves_before_a_barrier():
    """A return or continue around a barrier hangs or races on a GPU: numba/numba#9770, #1626, #2655."""
    known = waiting_functions(DEVICE)
    constrained = known["kernels/constrained_softmax.py"]
    assert {"block_sum3", "cluster_max", "reduce_max", "search", "_search_scanned"} <= constrained
    assert not {"exp2", "record_event", "load"} & constrained
    assert {name: lines for name, tree in DEVICE.items() if (lines := early_exits(tree, known[name]))} == {}
    wrong = "@cuda.jit\ndef kernel(a):\n if a:\n  return\n for i in a:\n  if i:\n   continue\n  reduce_max(i)\n return"
    assert sorted(set(early_exits(ast.parse(wrong), constrained))) == [4, 7]
