"""Copies from global to shared memory that a thread starts and waits for later (8.0 and later; made at once before)."""

from __future__ import annotations

from functools import cache

from burt_numba.backend import SIMULATED

if SIMULATED:
    import numpy as np

    from burt_numba.simulator import read_elements, write_elements

    def shared_address(target):
        """What ``start_copy`` takes along with a shared array, once for many copies."""
        return np.int32(0)

    @cache
    def start_copy_of(size: int):
        """``start_copy`` of so many bytes: 16 or 8."""

        def start_copy(target, address, index, source, first):
            values = read_elements(source, first, size // source.dtype.itemsize)
            write_elements(target, index, values.view(target.dtype))

        return start_copy

    def close_group():
        """The copies that this thread has started since the last call are a group, even where there are none."""

    @cache
    def wait_for_all_but(groups: int):
        """A device function: the copies of all groups of this thread but so many of the latest are there."""

        def wait():
            pass

        return wait

    def wait_for_copies():
        """All copies that this thread has started are there; other threads see them after a barrier."""

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly, at_least, control, element_pointer

    # The shorter one has no form that leaves the multiprocessor's own cache out.
    _COPY = {16: "cp.async.cg.shared.global [$0], [$1], 16;", 8: "cp.async.ca.shared.global [$0], [$1], 8;"}

    @intrinsic
    def shared_address(typingctx, target):
        def codegen(context, builder, signature, args):
            place = element_pointer(context, builder, target, args[0], ir.Constant(ir.IntType(64), 0))
            within = builder.addrspacecast(place, ir.PointerType(place.type.pointee, addrspace=3))
            address = builder.ptrtoint(within, ir.IntType(32))
            # Otherwise the address would be made anew for every copy.
            return assembly(builder, address.type, [address], "mov.b32 $0, $1;", "=r,r")

        return types.int32(target), codegen

    @cache
    def start_copy_of(size: int):
        @intrinsic
        def start_copy(typingctx, target, address, index, source, first):
            item_bytes = target.dtype.bitwidth // 8

            def codegen(context, builder, signature, args):
                target_value, address_value, index_value, source_value, first_value = args
                origin = element_pointer(context, builder, source, source_value, first_value)
                vector = ir.VectorType(ir.IntType(32), size // 4)
                # What the condition rules out is dropped.
                with builder.if_else(at_least(builder, 8, 0)) as (asynchronous, plain):
                    with asynchronous:
                        place = builder.add(
                            address_value, builder.mul(index_value, ir.Constant(index_value.type, item_bytes))
                        )
                        operands = [place, builder.ptrtoint(origin, ir.IntType(64))]
                        assembly(builder, ir.VoidType(), operands, _COPY[size], "r,l,~{memory}")
                    with plain:
                        place = element_pointer(context, builder, target, target_value, index_value)
                        value = builder.load(builder.bitcast(origin, vector.as_pointer()))
                        value.align = size
                        builder.store(value, builder.bitcast(place, vector.as_pointer()), align=size)
                return context.get_dummy_value()

            return types.void(target, types.int32, types.int32, source, types.int64), codegen

        return start_copy

    close_group = control("cp.async.commit_group;", since=(8, 0))

    @cache
    def wait_for_all_but(groups: int):
        return control(f"cp.async.wait_group {groups};", since=(8, 0))

    wait_for_copies = control("cp.async.wait_all;", since=(8, 0))

# 16 bytes of a global array from ``first`` on to a shared array from ``index`` on; both places are aligned.
start_copy = start_copy_of(16)
# The copies of all groups of this thread but the latest are there.
wait_for_older_groups = wait_for_all_but(1)
