"""Products of small matrices by the warp: tensor cores, where the device has them for float32 (8.0 and later).

One step multiplies 16 x 8 by 8 x 8 and adds 16 x 8 (PTX ISA, "mma.m16n8k8", type tf32). A lane has, with g = lane / 4
and t = lane % 4:

    a       [g][t], [g + 8][t], [g][t + 4], [g + 8][t + 4]
    b       [t][g], [t + 4][g]
    sums    [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1]
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import SIMULATED

_KEPT = 0xFFFFE000
"""The bits of a float32 number that a tensor core takes."""
_HALF = 0x1000

if SIMULATED:
    from burt_numba import simulator
    from burt_numba.target import SIMULATED_CAPABILITY

    def has_tensor_cores():
        """Whether ``multiply_add`` may be called."""
        return SIMULATED_CAPABILITY >= (8, 0)

    def split(values, high, low, place):
        """A float32 number as the sum of two of 11 significant bits, but for 2**-21 of it, or 2**-136."""
        value = values[place]
        rounded = _number(_bits(value) + _HALF)
        high[place] = rounded
        with np.errstate(all="ignore"):
            low[place] = _number(_bits(value - rounded))

    def _bits(value):
        return int(value.view(np.uint32))

    def _number(bits):
        return np.uint32(bits & _KEPT).view(np.float32)

    def multiply_add(a, a_first, b, b_first, sums, first):
        """One step on the cells of three local arrays from a place on; all lanes of a warp call it."""
        operands = [a[a_first + cell] for cell in range(4)] + [b[b_first + cell] for cell in range(2)]
        operands += [sums[first + cell] for cell in range(4)]
        for cell, value in enumerate(simulator.multiply_add(operands)):
            sums[first + cell] = value

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly, at_least, element_pointer

    @intrinsic
    def has_tensor_cores(typingctx):
        def codegen(context, builder, signature, args):
            return at_least(builder, 8, 0)

        return types.boolean(), codegen

    @intrinsic
    def split(typingctx, values, high, low, place):
        def codegen(context, builder, signature, args):
            word, number = ir.IntType(32), ir.FloatType()
            values_value, high_value, low_value, place_value = args
            value = builder.load(element_pointer(context, builder, values, values_value, place_value))
            bits = builder.add(builder.bitcast(value, word), ir.Constant(word, _HALF))
            rounded = builder.bitcast(builder.and_(bits, ir.Constant(word, _KEPT)), number)
            rest = builder.bitcast(builder.fsub(value, rounded), word)
            rest = builder.bitcast(builder.and_(rest, ir.Constant(word, _KEPT)), number)
            builder.store(rounded, element_pointer(context, builder, high, high_value, place_value))
            builder.store(rest, element_pointer(context, builder, low, low_value, place_value))
            return context.get_dummy_value()

        return types.void(values, high, low, types.int64), codegen

    @intrinsic
    def multiply_add(typingctx, a, a_first, b, b_first, sums, first):
        def codegen(context, builder, signature, args):
            word, number = ir.IntType(32), ir.FloatType()
            a_value, a_place, b_value, b_place, sums_value, place = args

            def cells(array_type, array, start, count):
                for cell in range(count):
                    index = builder.add(start, ir.Constant(start.type, cell))
                    yield element_pointer(context, builder, array_type, array, index)

            operands = [builder.bitcast(builder.load(cell), word) for cell in cells(a, a_value, a_place, 4)]
            operands += [builder.bitcast(builder.load(cell), word) for cell in cells(b, b_value, b_place, 2)]
            results = list(cells(sums, sums_value, place, 4))
            operands += [builder.load(cell) for cell in results]
            text = (
                "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$0, $1, $2, $3};"
            )
            together = ir.LiteralStructType([number] * 4)
            answer = assembly(builder, together, operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3")
            for part, cell in enumerate(results):
                builder.store(builder.extract_value(answer, part), cell)
            return context.get_dummy_value()

        return types.void(a, types.int64, b, types.int64, sums, types.int64), codegen
