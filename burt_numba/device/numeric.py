"""Scalar arithmetic in float32 that is the same on the GPU and in the simulator."""

from __future__ import annotations

import numpy as np

from burt_numba.backend import SIMULATED, cuda

FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)
NEGATIVE_INFINITY = np.float32(-np.inf)

if SIMULATED:
    _SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)

    def exp2(x):
        """2**x, subnormal results flushed to zero, as ``ex2.approx.ftz.f32`` gives it."""
        result = np.exp2(np.float32(x))
        return result if result >= _SMALLEST_NORMAL else np.float32(0.0)

    def log2(x):
        """Base-2 logarithm, as ``lg2.approx.ftz.f32`` gives it (-inf at 0)."""
        return np.log2(np.float32(x))

    def maximum(a, b):
        """The larger of two float32 values, neither of them NaN."""
        return a if a > b else b

    def minimum(a, b):
        """The smaller of two float32 values, neither of them NaN."""
        return a if a < b else b

    def reciprocal(x):
        """1 / x, as ``rcp.approx.ftz.f32`` gives it (1 unit in the last place; 0 below the smallest normal number)."""
        result = np.float32(1.0) / np.float32(x)
        return result if abs(result) >= _SMALLEST_NORMAL else np.float32(0.0)

    def square_root(x):
        """The square root, as ``sqrt.approx.ftz.f32`` gives it."""
        return np.sqrt(np.float32(x))

    def log(x):
        """Natural logarithm to float32 accuracy."""
        return np.float32(np.log(np.float64(x)))

    def opaque(number):
        """The int32 or float32 number, of which the compiler knows nothing: what is made of it stays where it is made.

        For rare paths inside loops, whose addresses would else be kept in registers all along.
        """
        return number if isinstance(number, (np.float32, np.int32)) else np.int32(number)

    def choose(condition, a, b):
        """One of two float32 values, without a branch and where it stands.

        The compiler does not know that all lanes of a warp have to make the same shuffle: it may make one loop with
        shuffles into two, one for each answer to a condition, unless there is such an instruction in it.
        """
        return a if condition else b

    def whole_quotient(a, b):
        """a // b of int32 numbers that are not negative. (Numba divides in 64 bits, with a subroutine.)"""
        return np.int32(a // b)
else:
    import math

    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from burt_numba.backend import types
    from burt_numba.device.assembly import assembly

    def _nvvm_call(name: str, arity: int):
        """An intrinsic that calls one float32 NVVM intrinsic: one machine instruction, which LLVM may move and fold."""

        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * arity)
            function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
            return builder.call(function, args)

        signature = types.float32(*[types.float32] * arity)
        if arity == 1:

            @intrinsic
            def call(typingctx, x):
                return signature, codegen

        else:

            @intrinsic
            def call(typingctx, a, b):
                return signature, codegen

        return call

    def _instruction(name: str):
        """An intrinsic for a float32 instruction of one operand that NVVM has no intrinsic of its own for."""

        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
            return builder.call(ir.InlineAsm(function_type, f"{name} $0, $1;", "=f,f"), args)

        @intrinsic
        def call(typingctx, x):
            return types.float32(types.float32), codegen

        return call

    @intrinsic
    def opaque(typingctx, number):
        kind = types.float32 if number == types.float32 else types.int32
        letter = "f" if number == types.float32 else "r"

        def codegen(context, builder, signature, args):
            return assembly(builder, args[0].type, args, "mov.b32 $0, $1;", f"={letter},{letter}")

        return kind(kind), codegen

    @intrinsic
    def choose(typingctx, condition, a, b):
        def codegen(context, builder, signature, args):
            condition, a, b = args
            word = builder.zext(condition, ir.IntType(32))
            text = "{ .reg .pred first; setp.ne.u32 first, $3, 0; selp.f32 $0, $1, $2, first; }"
            return assembly(builder, ir.FloatType(), [a, b, word], text, "=f,f,f,r")

        return types.float32(types.boolean, types.float32, types.float32), codegen

    @intrinsic
    def whole_quotient(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return builder.udiv(*args)

        return types.int32(types.int32, types.int32), codegen

    exp2 = _nvvm_call("llvm.nvvm.ex2.approx.ftz.f", 1)
    log2 = _nvvm_call("llvm.nvvm.lg2.approx.ftz.f", 1)
    reciprocal = _instruction("rcp.approx.ftz.f32")
    square_root = _instruction("sqrt.approx.ftz.f32")
    maximum = _nvvm_call("llvm.nvvm.fmax.f", 2)
    minimum = _nvvm_call("llvm.nvvm.fmin.f", 2)

    @cuda.jit(device=True)
    def log(x):
        return math.log(x)


# ln 2 as two numbers, the first of 9 bits: products with exponents of 8 bits are exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440054690583e-4)
_ROUNDING = np.float32(12582912.0)
"""1.5 * 2**23: added and taken away again, it rounds to a whole number."""
_LARGEST_ACTIVATION = np.float32(88.0)
"""Of a sigmoid: e to its power is a float32 number, whose reciprocal is below the smallest normal one."""


@cuda.jit(device=True)
def sigmoid_pair(x):
    """(sigmoid of x, 1 - sigmoid), each to full relative accuracy; 0 below the smallest normal number."""
    one = np.float32(1.0)
    x = minimum(maximum(x, -_LARGEST_ACTIVATION), _LARGEST_ACTIVATION)
    # e^x = 2^whole e^rest: rounding x log2(e), of up to 7 bits before the point, would cost the result as many.
    whole = (x * LOG2_E + _ROUNDING) - _ROUNDING
    rest = ((x - whole * _LN_2_HIGH) - whole * _LN_2_LOW) * LOG2_E
    return reciprocal(one + exp2(-whole) * exp2(-rest)), reciprocal(one + exp2(whole) * exp2(rest))
