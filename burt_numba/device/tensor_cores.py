"""Products of small matrices by the warp: tensor cores, where the device has them for float32 (8.0 and later).

One step multiplies 16 x 8 by 8 x 8 words and adds 16 x 8 (PTX ISA, "mma.m16n8k8" of type tf32, and "mma.m16n8k16" of
type f16, whose words are pairs of numbers). A lane has, with g = lane / 4 and t = lane % 4:

    a       [g][t], [g + 8][t], [g][t + 4], [g + 8][t + 4]
    b       [t][g], [t + 4][g]
    sums    [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1]

Which places of the inner axis are called t and t + 4 is the caller's choice, as long as both operands agree.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import SIMULATED

_KEPT = 0xFFFFE000
"""The bits of a float32 number that a tensor core takes."""
_HALF = 0x1000

if SIMULATED:
    from burt_numba.simulator import multiply_add as multiply_add
    from burt_numba.target import SIMULATED_CAPABILITY

    # Numbers and their bits: views of scalars take ten times as long. No thread is interrupted in between.
    _cell = np.zeros(1, np.float32)
    _cell_bits = memoryview(_cell).cast("B").cast("I")
    _words = np.zeros(3, np.uint32)
    _word_halves, _word_numbers = _words.view(np.uint16), _words.view(np.float16)

    def has_tensor_cores():
        """Whether ``multiply_add`` may be called."""
        return SIMULATED_CAPABILITY >= (8, 0)

    def split(values, high, low, place):
        """A float32 number as the sum of two of 11 significant bits, but for 2**-21 of it, or 2**-136."""
        value = values[place]
        upper = _kept(value, _HALF)
        high[place] = upper
        low[place] = _kept(value - upper, 0)

    def cut(values, high, low, place):
        """As ``split``, but cut: quicker, and all but 2**-20 of the number."""
        value = values[place]
        upper = _kept(value, 0)
        high[place] = upper
        low[place] = value - upper

    def rounded(value):
        """What a tensor core takes for the nearest float32 number of 11 significant bits, of two as near the farther.

        The number is to be finite, and so is the result. Bits that a tensor core does not look at may be left.
        """
        return _kept(value, _HALF)

    def pair_of_halves(first, second):
        """Two float32 numbers as a word of two float16 numbers, the first in the lower bits."""
        _word_numbers[0] = first
        _word_numbers[1] = second
        return _words[0]

    def halves_beside(first, second, upper):
        """A half of each of two words, the lower or the upper one, as a word."""
        _words[0] = first
        _words[1] = second
        _word_halves[4] = _word_halves[upper]
        _word_halves[5] = _word_halves[2 + upper]
        return _words[2]

    def _kept(value, added):
        """What a tensor core takes of a float32 number, to whose bits something is added before."""
        _cell[0] = value
        _cell_bits[0] = _cell_bits[0] + added & _KEPT
        return _cell[0]

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
    def cut(typingctx, values, high, low, place):
        def codegen(context, builder, signature, args):
            word, number = ir.IntType(32), ir.FloatType()
            values_value, high_value, low_value, place_value = args
            value = builder.load(element_pointer(context, builder, values, values_value, place_value))
            bits = builder.and_(builder.bitcast(value, word), ir.Constant(word, _KEPT))
            upper = builder.bitcast(bits, number)
            builder.store(upper, element_pointer(context, builder, high, high_value, place_value))
            rest = builder.fsub(value, upper)
            builder.store(rest, element_pointer(context, builder, low, low_value, place_value))
            return context.get_dummy_value()

        return types.void(values, high, low, types.int64), codegen

    @intrinsic
    def rounded(typingctx, value):
        def codegen(context, builder, signature, args):
            # One instruction; the conversion takes four, to keep what is not finite.
            word = ir.IntType(32)
            bits = builder.add(builder.bitcast(args[0], word), ir.Constant(word, _HALF))
            return builder.bitcast(bits, ir.FloatType())

        return types.float32(types.float32), codegen

    @intrinsic
    def pair_of_halves(typingctx, first, second):
        def codegen(context, builder, signature, args):
            pair = ir.Constant(ir.VectorType(ir.HalfType(), 2), ir.Undefined)
            for place, value in enumerate(args):
                half = builder.fptrunc(value, ir.HalfType())
                pair = builder.insert_element(pair, half, ir.Constant(ir.IntType(32), place))
            return builder.bitcast(pair, ir.IntType(32))

        return types.uint32(types.float32, types.float32), codegen

    @intrinsic
    def halves_beside(typingctx, first, second, upper):
        def codegen(context, builder, signature, args):
            word = ir.IntType(32)
            first_value, second_value, upper_value = args
            # Of the bytes of both words: 0, 1, 4 and 5, or 2, 3, 6 and 7.
            chosen = builder.select(
                builder.icmp_signed("!=", upper_value, ir.Constant(upper_value.type, 0)),
                ir.Constant(word, 0x7632),
                ir.Constant(word, 0x5410),
            )
            operands = [first_value, second_value, chosen]
            return assembly(builder, word, operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")

        return types.uint32(types.uint32, types.uint32, types.int64), codegen

    @intrinsic
    def multiply_add(typingctx, a, a_first, b, b_first, sums, first):
        shape = "m16n8k8.row.col.f32.tf32.tf32" if b.dtype == types.float32 else "m16n8k16.row.col.f32.f16.f16"
        text = f"mma.sync.aligned.{shape}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$0, $1, $2, $3}};"

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
            together = ir.LiteralStructType([number] * 4)
            answer = assembly(builder, together, operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3")
            for part, cell in enumerate(results):
                builder.store(builder.extract_value(answer, part), cell)
            return context.get_dummy_value()

        return types.void(a, types.int64, b, types.int64, sums, types.int64), codegen
