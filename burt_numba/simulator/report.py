"""Say where the threads of a launch stand when none of them can go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from burt_numba.simulator.places import call_chain, describe_chain, is_simulator

if TYPE_CHECKING:
    from burt_numba.simulator.scheduler import Launch
    from burt_numba.simulator.threads import Block, Thread


def ranges(indices: Iterable[int]) -> str:
    """Rising ``indices`` in short: ``0-31, 40``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _whereabouts(thread: Thread) -> str:
    if not thread.running:
        return "exited"
    frame = thread.gr_frame
    if frame is None:
        return "not started"
    call = frame
    while frame is not None and is_simulator(frame):
        call, frame = frame, frame.f_back
    operation = call.f_code.co_name
    if operation == "sync":
        operation = "cg.this_grid().sync"
    mask = call.f_locals.get("mask")
    if mask is not None:
        operation += f" with mask 0x{int(mask) & 0xFFFFFFFF:08x}"
    if frame is None:
        return f"waiting in {operation}"
    return f"waiting in {operation} at {describe_chain(call_chain(frame))}"


def _block_lines(launch: Launch, block: Block) -> list[str]:
    groups: dict[str, list[int]] = {}
    for thread in block.threads:
        groups.setdefault(_whereabouts(thread), []).append(thread.index)
    lines = [f"block {block.index}:"]
    for where, indices in groups.items():
        lines.append(f"  {'thread' if len(indices) == 1 else 'threads'} {ranges(indices)}: {where}")
    return lines


def divergence(launch: Launch) -> str:
    """The message of a DivergenceError: kernel, blocks, threads and the source line where each of them waits."""
    lines = [f"kernel {launch.name}: threads wait for others that cannot arrive"]
    extent = launch.block_dim
    if extent.y * extent.z > 1:
        lines[0] += f" (threads numbered x first in a block of {extent})"
    for cluster in launch.clusters:
        for block in cluster.blocks:
            if any(thread.running for thread in block.threads):
                lines += _block_lines(launch, block)
    started = sum(any(thread.running for thread in block.threads) for c in launch.clusters for block in c.blocks)
    if launch.grid_barrier is not None and started < launch.blocks:
        lines.append(f"{launch.blocks - started} of the {launch.blocks} blocks of the grid have exited")
    return "\n".join(lines)
