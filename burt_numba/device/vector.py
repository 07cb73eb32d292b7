"""Loads and stores of up to 16 bytes between global memory and registers (local arrays with constant indices).

``load_vector(count)``, ``unpack_vectors(count, vectors)`` and ``store_vector(count)`` give device functions for vectors
of ``count`` elements, whatever the element type: float32 and float16 (converted to and from float32), uint8 (a
boolean mask) and words of 32 bits. ``store_words(count)`` stores what was loaded as it is. The address must be a
multiple of the vector's bytes, or of 16 where that is less.

A load leaves the words as they are in memory, since a conversion would wait for them: a thread first starts all its
loads, then unpacks. A vector takes ``count`` words of the local array, more than it needs where elements are small.
"""

from __future__ import annotations

from functools import cache

from burt_numba.backend import SIMULATED

if SIMULATED:
    import numpy as np

    from burt_numba.simulator import read_elements, write_elements

    def element_at(array, index):
        """An element at an index that is not negative, which Numba would look into."""
        return array[index]

    def set_element(array, index, value):
        array[index] = value

    def prefetch_line(array, index):
        """There is no cache."""

    @cache
    def load_vector(count: int):
        def load(source, index, words, first):
            elements = read_elements(source, index, count)
            if elements.itemsize < 4:
                # What the elements do not fill is zero.
                filled = np.zeros(count, np.uint32).view(elements.dtype)
                filled[:count] = elements
                elements = filled
            words[first : first + count] = elements.view(np.uint32)

        return load

    @cache
    def fill_vector(count: int):
        def fill(source, words, first):
            value = 0 if source.dtype == np.uint8 else -np.inf
            words[first : first + count] = np.full(4 * count // source.dtype.itemsize, value, source.dtype).view(
                np.uint32
            )

        return fill

    @cache
    def unpack_vectors(count: int, vectors: int):
        def unpack(source, words, registers):
            element = source.dtype
            if element.itemsize == 4:
                registers[: vectors * count] = read_elements(words, 0, vectors * count).view(element)
                return
            used = max(count * element.itemsize // 4, 1)
            for first in range(0, vectors * count, count):
                registers[first : first + count] = read_elements(words, first, used).view(element)[:count]

        return unpack

    @cache
    def store_vector(count: int):
        def store(target, index, registers, first):
            write_elements(target, index, read_elements(registers, first, count))

        return store

    @cache
    def rotate_elements(count: int, step: int, parts: int = 1):
        """Elements of a local array move ``step`` places down, the first to the end: each of ``parts`` times ``count``.

        A loop that looks at the first ones and rotates stays a loop, though the array lies in registers.
        """

        def rotate(array):
            for first in range(0, parts * count, count):
                array[first : first + count] = np.roll(read_elements(array, first, count), -step)

        return rotate

    @cache
    def add_weighted(vectors: int, rows: int, pieces: int, width: int, part: int):
        """Of pieces of ``width`` elements, one part: 4 of each, which each row adds by its weight of their vector.

        ``add(values, weights, sums)``: [vectors, pieces, 4], [rows, vectors] and [rows, pieces, width] in local arrays.
        """

        def add(values, weights, sums):
            for vector in range(vectors):
                for row in range(rows):
                    for piece in range(pieces):
                        for element in range(4):
                            value = values[(vector * pieces + piece) * 4 + element]
                            sums[(row * pieces + piece) * width + part * 4 + element] += (
                                weights[row * vectors + vector] * value
                            )

        return add

    @cache
    def store_words(count: int):
        def store(target, index, words, first):
            used = max(count * target.dtype.itemsize // 4, 1)
            write_elements(target, index, read_elements(words, first, used).view(target.dtype)[:count])

        return store

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly, element_address, element_pointer

    _WORD = ir.IntType(32)
    _INDEX = ir.IntType(64)
    _LLVM_ELEMENT = {
        types.float32: ir.FloatType(),
        types.float16: ir.HalfType(),
        types.uint8: ir.IntType(8),
        types.uint32: ir.IntType(32),
    }
    _BYTES = {types.float32: 4, types.float16: 2, types.uint8: 1, types.uint32: 4}
    _FILL = {types.float32: 0xFF800000, types.float16: 0xFC00FC00, types.uint8: 0}

    def _words(element_type, count):
        """A vector as the integers that are really moved: NVPTX splits vectors of half into scalars."""
        size = count * _BYTES[element_type]
        return ir.VectorType(_WORD, size // 4) if size > 4 else ir.IntType(8 * size)

    def _aligned_pieces(element_type, count):
        """(elements a piece, pieces): no access is wider than 16 bytes."""
        piece = min(count, 16 // _BYTES[element_type])
        return piece, count // piece

    def _vector_words(element_type, count):
        """The 32-bit words that hold a vector; one where it is shorter than a word."""
        return max(count * _BYTES[element_type] // 4, 1)

    @intrinsic
    def element_at(typingctx, array, index):
        """An element at an index that is not negative, which Numba would look into."""

        def codegen(context, builder, signature, args):
            return builder.load(element_pointer(context, builder, array, *args))

        return array.dtype(array, types.int64), codegen

    @intrinsic
    def set_element(typingctx, array, index, value):
        def codegen(context, builder, signature, args):
            array_value, index_value, number = args
            builder.store(number, element_pointer(context, builder, array, array_value, index_value))
            return context.get_dummy_value()

        return types.void(array, types.int64, array.dtype), codegen

    @intrinsic
    def prefetch_line(typingctx, array, index):
        """Bring the cache line of an element of global memory nearer, to the cache that all multiprocessors share."""

        def codegen(context, builder, signature, args):
            address = element_address(context, builder, array, *args)
            assembly(builder, ir.VoidType(), [address], "prefetch.global.L2 [$0];", "l")
            return context.get_dummy_value()

        return types.void(array, types.int64), codegen

    @cache
    def load_vector(count: int):
        @intrinsic
        def load(typingctx, source, index, words, first):
            """Elements ``index``, ... of an array into the words from ``first``."""
            element = source.dtype
            piece, pieces = _aligned_pieces(element, count)

            def codegen(context, builder, signature, args):
                source_value, index_value, words_value, first_value = args
                pointer = element_pointer(context, builder, source, source_value, index_value)
                target = element_pointer(context, builder, words, words_value, first_value)
                raw = _words(element, piece)
                base = builder.bitcast(pointer, raw.as_pointer())
                piece_words = _vector_words(element, piece)
                for part in range(pieces):
                    loaded = builder.load(builder.gep(base, [ir.Constant(_INDEX, part)]))
                    loaded.align = piece * _BYTES[element]
                    for word in range(piece_words):
                        value = loaded
                        if isinstance(raw, ir.VectorType):
                            value = builder.extract_element(loaded, ir.Constant(_WORD, word))
                        elif raw.width < 32:
                            value = builder.zext(loaded, _WORD)
                        builder.store(value, builder.gep(target, [ir.Constant(_INDEX, part * piece_words + word)]))
                return context.get_dummy_value()

            return types.void(source, types.int64, words, types.int64), codegen

        return load

    @cache
    def fill_vector(count: int):
        @intrinsic
        def fill(typingctx, source, words, first):
            """-inf (0 in a boolean mask) in place of a vector of the array's type."""
            element = source.dtype

            def codegen(context, builder, signature, args):
                _source_value, words_value, first_value = args
                target = element_pointer(context, builder, words, words_value, first_value)
                filled = ir.Constant(_WORD, _FILL[element])
                for word in range(_vector_words(element, count)):
                    builder.store(filled, builder.gep(target, [ir.Constant(_INDEX, word)]))
                return context.get_dummy_value()

            return types.void(source, words, types.int64), codegen

        return fill

    @cache
    def unpack_vectors(count: int, vectors: int):
        @intrinsic
        def unpack(typingctx, source, words, registers):
            """All vectors of the array's type in the words, as float32 in the registers."""
            element = source.dtype
            lanes = 32 // (8 * _BYTES[element])

            def codegen(context, builder, signature, args):
                _source_value, words_value, registers_value = args
                origin = context.make_array(words)(context, builder, words_value).data
                target = context.make_array(registers)(context, builder, registers_value).data
                # Written out: a loop that is not unrolled in time leaves both arrays in local memory.
                for place in range(vectors * count):
                    first = place // count * count
                    word_place = first + place % count // lanes
                    word = builder.load(builder.gep(origin, [ir.Constant(_INDEX, word_place)]))
                    packed = builder.bitcast(word, ir.VectorType(_LLVM_ELEMENT[element], lanes))
                    value = builder.extract_element(packed, ir.Constant(_WORD, place % count % lanes))
                    if element == types.float16:
                        value = builder.fpext(value, ir.FloatType())
                    elif element == types.uint8:
                        value = builder.uitofp(value, ir.FloatType())
                    builder.store(value, builder.gep(target, [ir.Constant(_INDEX, place)]))
                return context.get_dummy_value()

            return types.void(source, words, registers), codegen

        return unpack

    @cache
    def store_vector(count: int):
        @intrinsic
        def store(typingctx, target, index, registers, first):
            element = target.dtype
            piece, pieces = _aligned_pieces(element, count)

            def codegen(context, builder, signature, args):
                target_value, index_value, registers_value, first_value = args
                pointer = element_pointer(context, builder, target, target_value, index_value)
                origin = element_pointer(context, builder, registers, registers_value, first_value)
                words = _words(element, piece)
                lanes = ir.VectorType(_LLVM_ELEMENT[element], piece)
                base = builder.bitcast(pointer, words.as_pointer())
                for part in range(pieces):
                    values = ir.Constant(lanes, ir.Undefined)
                    for lane in range(piece):
                        place = builder.gep(origin, [ir.Constant(_INDEX, part * piece + lane)])
                        value = builder.load(place)
                        if element == types.float16:
                            value = builder.fptrunc(value, ir.HalfType())
                        values = builder.insert_element(values, value, ir.Constant(_WORD, lane))
                    place = builder.gep(base, [ir.Constant(_INDEX, part)])
                    builder.store(builder.bitcast(values, words), place, align=piece * _BYTES[element])
                return context.get_dummy_value()

            return types.void(target, types.int64, registers, types.int64), codegen

        return store

    @cache
    def rotate_elements(count: int, step: int, parts: int = 1):
        @intrinsic
        def rotate(typingctx, array):
            def codegen(context, builder, signature, args):
                origin = context.make_array(array)(context, builder, args[0]).data
                # Written out, as in unpack_vectors.
                cells = [builder.gep(origin, [ir.Constant(_INDEX, place)]) for place in range(parts * count)]
                elements = [builder.load(cell) for cell in cells]
                for place, cell in enumerate(cells):
                    builder.store(elements[place // count * count + (place + step) % count], cell)
                return context.get_dummy_value()

            return types.void(array), codegen

        return rotate

    @cache
    def add_weighted(vectors: int, rows: int, pieces: int, width: int, part: int):
        @intrinsic
        def add(typingctx, values, weights, sums):
            def codegen(context, builder, signature, args):
                def cell_of(origin, place):
                    return builder.gep(origin, [ir.Constant(_INDEX, place)])

                own_values, own_weights, own_sums = (
                    context.make_array(kind)(context, builder, arg).data
                    for kind, arg in zip(signature.args, args, strict=True)
                )
                # Written out, as in unpack_vectors.
                for vector in range(vectors):
                    for place in range(rows * pieces * 4):
                        row, piece, element = place // (4 * pieces), place // 4 % pieces, place % 4
                        value = builder.load(cell_of(own_values, (vector * pieces + piece) * 4 + element))
                        weight = builder.load(cell_of(own_weights, row * vectors + vector))
                        cell = cell_of(own_sums, (row * pieces + piece) * width + part * 4 + element)
                        builder.store(builder.fadd(builder.load(cell), builder.fmul(weight, value)), cell)
                return context.get_dummy_value()

            return types.void(values, weights, sums), codegen

        return add

    @cache
    def store_words(count: int):
        @intrinsic
        def store(typingctx, target, index, words, first):
            element = target.dtype
            piece, pieces = _aligned_pieces(element, count)

            def codegen(context, builder, signature, args):
                target_value, index_value, words_value, first_value = args
                pointer = element_pointer(context, builder, target, target_value, index_value)
                origin = element_pointer(context, builder, words, words_value, first_value)
                raw = _words(element, piece)
                base = builder.bitcast(pointer, raw.as_pointer())
                piece_words = _vector_words(element, piece)
                for part in range(pieces):
                    value = ir.Constant(raw, ir.Undefined)
                    for word in range(piece_words):
                        loaded = builder.load(builder.gep(origin, [ir.Constant(_INDEX, part * piece_words + word)]))
                        if isinstance(raw, ir.VectorType):
                            value = builder.insert_element(value, loaded, ir.Constant(_WORD, word))
                        else:
                            value = builder.trunc(loaded, raw) if raw.width < 32 else loaded
                    place = builder.gep(base, [ir.Constant(_INDEX, part)])
                    builder.store(value, place, align=piece * _BYTES[element])
                return context.get_dummy_value()

            return types.void(target, types.int64, words, types.int64), codegen

        return store
