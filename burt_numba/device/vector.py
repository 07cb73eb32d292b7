"""Loads and stores of up to 16 bytes between global memory and registers (a local array with constant indices).

``load_vector(count)`` and ``store_vector(count)`` give a device function for vectors of that many elements, whatever
the element type: float32 and float16 (converted to and from float32) and uint8 (a boolean mask). The address must be
a multiple of the vector's bytes, or of 16 where that is less.
"""

from __future__ import annotations

from functools import cache

from burt_numba.backend import SIMULATED

if SIMULATED:

    def _simulated_load(source, index, registers, first, count):
        if index < 0 or index + count > source.size:
            raise IndexError(f"vector load of {count} elements at {index} of an array of {source.size}")
        registers[first : first + count] = source[index : index + count]

    def _simulated_store(target, index, registers, first, count):
        if index < 0 or index + count > target.size:
            raise IndexError(f"vector store of {count} elements at {index} of an array of {target.size}")
        target[index : index + count] = registers[first : first + count]

    @cache
    def load_vector(count: int):
        def load(source, index, registers, first):
            _simulated_load(source, index, registers, first, count)

        return load

    @cache
    def store_vector(count: int):
        def store(target, index, registers, first):
            _simulated_store(target, index, registers, first, count)

        return store

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types

    _WORD = ir.IntType(32)
    _LLVM_ELEMENT = {
        types.float32: ir.FloatType(),
        types.float16: ir.HalfType(),
        types.uint8: ir.IntType(8),
    }
    _BYTES = {types.float32: 4, types.float16: 2, types.uint8: 1}

    def _element_pointer(context, builder, array_type, array, index):
        struct = context.make_array(array_type)(context, builder, array)
        return builder.gep(struct.data, [index])

    def _words(element_type, count):
        """A vector as the integers that are really moved: NVPTX splits vectors of half into scalars."""
        size = count * _BYTES[element_type]
        return ir.VectorType(_WORD, size // 4) if size > 4 else ir.IntType(8 * size)

    def _aligned_pieces(element_type, count):
        """(elements a piece, pieces): no access is wider than 16 bytes."""
        piece = min(count, 16 // _BYTES[element_type])
        return piece, count // piece

    @cache
    def load_vector(count: int):
        @intrinsic
        def load(typingctx, source, index, registers, first):
            element = source.dtype
            piece, pieces = _aligned_pieces(element, count)

            def codegen(context, builder, signature, args):
                source_value, index_value, registers_value, first_value = args
                pointer = _element_pointer(context, builder, source, source_value, index_value)
                target = _element_pointer(context, builder, registers, registers_value, first_value)
                words = _words(element, piece)
                lanes = ir.VectorType(_LLVM_ELEMENT[element], piece)
                base = builder.bitcast(pointer, words.as_pointer())
                for part in range(pieces):
                    load_of = builder.load(builder.gep(base, [ir.Constant(ir.IntType(64), part)]))
                    load_of.align = piece * _BYTES[element]
                    values = builder.bitcast(load_of, lanes)
                    for lane in range(piece):
                        value = builder.extract_element(values, ir.Constant(_WORD, lane))
                        if element == types.float16:
                            value = builder.fpext(value, ir.FloatType())
                        elif element == types.uint8:
                            value = builder.uitofp(value, ir.FloatType())
                        place = builder.gep(target, [ir.Constant(ir.IntType(64), part * piece + lane)])
                        builder.store(value, place)
                return context.get_dummy_value()

            return types.void(source, types.int64, registers, types.int64), codegen

        return load

    @cache
    def store_vector(count: int):
        @intrinsic
        def store(typingctx, target, index, registers, first):
            element = target.dtype
            piece, pieces = _aligned_pieces(element, count)

            def codegen(context, builder, signature, args):
                target_value, index_value, registers_value, first_value = args
                pointer = _element_pointer(context, builder, target, target_value, index_value)
                origin = _element_pointer(context, builder, registers, registers_value, first_value)
                words = _words(element, piece)
                lanes = ir.VectorType(_LLVM_ELEMENT[element], piece)
                base = builder.bitcast(pointer, words.as_pointer())
                for part in range(pieces):
                    values = ir.Constant(lanes, ir.Undefined)
                    for lane in range(piece):
                        place = builder.gep(origin, [ir.Constant(ir.IntType(64), part * piece + lane)])
                        value = builder.load(place)
                        if element == types.float16:
                            value = builder.fptrunc(value, ir.HalfType())
                        values = builder.insert_element(values, value, ir.Constant(_WORD, lane))
                    place = builder.gep(base, [ir.Constant(ir.IntType(64), part)])
                    builder.store(builder.bitcast(values, words), place, align=piece * _BYTES[element])
                return context.get_dummy_value()

            return types.void(target, types.int64, registers, types.int64), codegen

        return store
