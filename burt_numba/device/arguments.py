"""Arrays that a kernel is given as a pointer alone (``host.launching.Array.bare``).

Numba passes an array in seven words. A kernel with twenty of them reads its arguments from as many lines of memory, and
each line that is new to a multiprocessor takes as long as a load from device memory, at every launch.
"""

from __future__ import annotations

from burt_numba.backend import SIMULATED

if SIMULATED:

    def array_at(array):
        """The array, which the simulator is given whole."""
        return array

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types

    @intrinsic
    def array_at(typingctx, pointer):
        """An array of one axis from here on, of more elements than memory has; of none where there is no pointer."""
        array = types.Array(pointer.dtype, 1, "C")

        def codegen(context, builder, signature, args):
            (data,) = args
            size_type = context.get_value_type(types.intp)
            item = context.get_abi_sizeof(context.get_data_type(array.dtype))
            nothing = builder.icmp_unsigned("==", builder.ptrtoint(data, size_type), ir.Constant(size_type, 0))
            size = builder.select(nothing, ir.Constant(size_type, 0), ir.Constant(size_type, 1 << 48))
            result = context.make_array(array)(context, builder)
            result.data = data
            result.shape = builder.insert_value(ir.Constant(result.shape.type, ir.Undefined), size, 0)
            strides = ir.Constant(result.strides.type, ir.Undefined)
            result.strides = builder.insert_value(strides, ir.Constant(size_type, item), 0)
            result.itemsize = ir.Constant(size_type, item)
            result.nitems = size
            result.meminfo = ir.Constant(result.meminfo.type, None)
            result.parent = ir.Constant(result.parent.type, None)
            return result._getvalue()

        return array(pointer), codegen
