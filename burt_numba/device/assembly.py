"""Inline PTX, for what Numba has no function for. Only the GPU's halves of the device modules import this."""

from __future__ import annotations

from llvmlite import ir


def assembly(builder, result, operands, text, constraints):
    """A call of the instructions, neither moved across others of its kind nor left out."""
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    code = ir.InlineAsm(function_type, text, constraints, side_effect=True)
    call = builder.call(code, operands)
    call.attributes.add("convergent")
    return call


def element_address(context, builder, array_type, array, index):
    """The address of an element, as an integer."""
    struct = context.make_array(array_type)(context, builder, array)
    return builder.ptrtoint(builder.gep(struct.data, [index]), ir.IntType(64))
