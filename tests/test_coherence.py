"""Memory that others look at while a kernel runs: the loads and stores of the machine, and groups of blocks."""

import numpy as np
import pytest
from test_compiling import assert_compiled

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import DivergenceError

simulated = pytest.mark.simulator_only("launches of the simulator itself")

# What the compiler makes of them --------------------------------------------------------------------------------------

COMPILER = """
from burt_numba.host import compiling
try:
    from cuda.pathfinder import load_nvidia_dynamic_lib
    for library in ("nvvm", "nvJitLink"):
        load_nvidia_dynamic_lib(library)
except Exception as missing:
    print("skip:", missing)
    raise SystemExit

def accesses(kind, kernel, names, capability=(9, 0)):
    ptx = compiling.Specialisation(kernel, names, capability).ptx()
    return [line for line in map(str.strip, ptx.splitlines()) if line.startswith(kind)]
"""

REPORTS = """
from burt_numba.cifg import specialisations as memories
from burt_numba.validation import validation_specialisations
validation = next(iter(validation_specialisations()))
gates = next(entry for entry in memories() if entry[0].name == "cifg_gates")
for entry in ((*validation, (7, 5)), (*validation, (9, 0)), gates):
    # The cells of the buffer, or a loop over them, between two looks at the version.
    assert len(accesses("ld.volatile.u64", *entry)) >= 3, entry
    assert len(accesses("st.volatile.u64", *entry)) >= 1, entry
print("done")
"""

WAITS = """
from burt_numba.backend import cuda
from burt_numba.device.coherence import group_barrier

@cuda.jit
def kernel(counters, out):
    group_barrier(counters, cuda.blockIdx.x // 2, 2)
    out[cuda.blockIdx.x] = 1

waits = compiling.KernelSpec("waits", lambda: kernel, (), (128, 1)), ("i8:1C", "f4:1C")
# Once before the block has arrived, and in the loop; no other load looks at the counters.
assert len(accesses("ld.volatile.u64", *waits)) == 1
assert len(accesses("ld.acquire.gpu.u64", *waits)) >= 1
# Who arrives leaves what it has written to those after it; the last one to all that wait.
assert len([line for line in accesses("{", *waits) if "atom.acq_rel.gpu.global.inc.u32" in line]) == 1
assert len([line for line in accesses("{", *waits) if "red.release.gpu.global.add.u64" in line]) == 1
assert not [line for line in accesses("ld.global", *waits) if "64" in line]
print("done")
"""


@pytest.mark.parametrize("script", [REPORTS, WAITS], ids=["reports", "a barrier of a group"])
def test_others_are_seen_through_volatile_accesses(monkeypatch, tmp_path, script):
    """A plain load may be served from a multiprocessor's own cache, and moved out of a loop that waits for it."""
    assert_compiled(COMPILER + script, monkeypatch, tmp_path)


# Groups of blocks in the simulator ------------------------------------------------------------------------------------


def exchange(inbox, out, blocks):
    """Every block leaves its number for its neighbour in the group, and reads after the barrier."""
    block = cuda.blockIdx.x
    group = block // blocks
    if cuda.threadIdx.x == 0:
        inbox[block] = block + 1
    simulator.group_barrier()
    neighbour = group * blocks + (block + 1) % blocks
    out[block, cuda.threadIdx.x] = inbox[neighbour]


@simulated
@pytest.mark.parametrize("group", [1, 2, 3, 4, 12])
def test_blocks_of_a_group_run_together(group):
    inbox, out = np.zeros(12, np.int64), np.zeros((12, 4), np.int64)
    simulator.launch(exchange, 12, 4, (inbox, out, group), group=group)
    blocks = np.arange(12)
    neighbours = blocks // group * group + (blocks + 1) % group
    assert (out == (neighbours + 1)[:, None]).all()


@simulated
def test_a_group_may_be_larger_than_a_cluster():
    inbox, out = np.zeros(40, np.int64), np.zeros((40, 1), np.int64)
    simulator.launch(exchange, 40, 1, (inbox, out, 40), group=40)
    assert (out[:, 0] == (np.arange(40) + 1) % 40 + 1).all()
    with pytest.raises(ValueError, match="cluster: expected 1 to 16 blocks, got 40"):
        simulator.launch(exchange, 40, 1, (inbox, out, 40), cluster=40)


@simulated
def test_groups_follow_each_other():
    """A group may not count on another one: it sees what earlier groups left, and nothing of later ones."""
    seen = np.full(6, -1, np.int64)
    cells = np.zeros(6, np.int64)

    def kernel(cells, seen):
        cells[cuda.blockIdx.x] = 1
        simulator.group_barrier()
        seen[cuda.blockIdx.x] = cells.sum()

    simulator.launch(kernel, 6, 1, (cells, seen), group=2)
    assert seen.tolist() == [2, 2, 4, 4, 6, 6]


@simulated
def test_a_barrier_for_each_of_many_turns():
    """Every block adds to a sum that the others read in the turn after; a barrier that let one through would show."""
    cells, sums = np.zeros((2, 4), np.int64), np.zeros((4, 5), np.int64)

    def kernel(cells, sums):
        block = cuda.blockIdx.x
        total = 0
        for turn in range(5):
            if cuda.threadIdx.x == 0:
                cells[turn % 2, block] = total + block
            simulator.group_barrier()
            total = cells[turn % 2].sum()
            if cuda.threadIdx.x == 0:
                sums[block, turn] = total

    simulator.launch(kernel, 4, 3, (cells, sums), group=4)
    assert sums.tolist() == [[6, 30, 126, 510, 2046]] * 4


@simulated
def test_a_group_barrier_that_a_block_misses():
    def kernel():
        if cuda.blockIdx.x != 1:
            simulator.group_barrier()

    with pytest.raises(DivergenceError, match=r"block \(0, 0, 0\)"):
        simulator.launch(kernel, 2, 2, (), group=2)


@simulated
@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        (3, {"group": 2}, r"launch: group: grid\.x must be a multiple of 2, got 3"),
        (1, {"group": 2}, r"launch: group: grid\.x must be a multiple of 2, got 1"),
        ((3, 2), {"group": 2}, r"launch: group: grid\.x must be a multiple of 2, got 3"),
        (4, {"group": 0}, r"launch: group: grid\.x must be a multiple of 0, got 4"),
        (4, {"group": -2}, r"launch: group: grid\.x must be a multiple of -2, got 4"),
        (4, {"group": 2, "cluster": 2}, "launch: group: expected 1 beside a cluster of 2, got 2"),
    ],
)
def test_refuses_groups_that_do_not_fit_the_grid(grid, options, message):
    ran = []
    with pytest.raises(ValueError, match=message):
        simulator.launch(lambda: ran.append(1), grid, 1, (), **options)
    assert not ran


@pytest.mark.gpu_only("the simulator knows groups from the launch, without counters")
def test_group_barrier_on_the_device():
    """Blocks of a cooperative launch meet through counters in memory, as often as they like."""
    from burt_numba.device.coherence import group_barrier
    from burt_numba.target import COUNTER_STRIDE

    @cuda.jit
    def kernel(cells, sums, counters, blocks):
        group = cuda.blockIdx.x // blocks
        rank = cuda.blockIdx.x - group * blocks
        total = np.int64(0)
        for turn in range(200):
            place = (group * 2 + turn % 2) * blocks
            if cuda.threadIdx.x == 0:
                cells[place + rank] = (total + rank) % 1000
            group_barrier(counters, group, blocks)
            total = np.int64(0)
            for other in range(blocks):
                total += cells[place + other]
        if cuda.threadIdx.x == 0:
            sums[cuda.blockIdx.x] = total

    for blocks, groups in ((2, 30), (7, 9), (60, 1)):
        cells = cuda.to_device(np.zeros(2 * blocks * groups, np.int64))
        sums = cuda.to_device(np.zeros(blocks * groups, np.int64))
        counters = cuda.to_device(np.zeros(COUNTER_STRIDE * groups, np.int64))
        kernel[blocks * groups, 64](cells, sums, counters, blocks)
        total = 0
        for _ in range(200):
            total = sum((total + rank) % 1000 for rank in range(blocks))
        assert (sums.copy_to_host() == total).all()
        assert counters.copy_to_host()[::COUNTER_STRIDE].tolist() == [0] * groups
