"""Inline PTX, for what Numba has no function for. Only the GPU's halves of the device modules import this."""

from __future__ import annotations

from contextlib import nullcontext

from llvmlite import ir
from numba.cuda.extending import intrinsic

from burt_numba.backend import types


def assembly(builder, result, operands, text, constraints):
    """A call of the instructions, neither moved across others of its kind nor left out."""
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    code = ir.InlineAsm(function_type, text, constraints, side_effect=True)
    call = builder.call(code, operands)
    call.attributes.add("convergent")
    return call


def element_pointer(context, builder, array_type, array, index):
    struct = context.make_array(array_type)(context, builder, array)
    return builder.gep(struct.data, [index])


def element_address(context, builder, array_type, array, index):
    """The address of an element, as an integer."""
    return builder.ptrtoint(element_pointer(context, builder, array_type, array, index), ir.IntType(64))


def at_least(builder, major, minor):
    """Whether the code is compiled for this compute capability or a later one, which the compiler answers."""
    module = builder.module
    text = bytearray(b"__CUDA_ARCH\0")
    name = "burt_numba_architecture"
    letter = ir.IntType(8)
    question = module.globals.get(name)
    if question is None:
        # libNVVM takes strings from constant memory.
        question = ir.GlobalVariable(module, ir.ArrayType(letter, len(text)), name, addrspace=4)
        question.initializer = ir.Constant(question.value_type, text)
        question.linkage = "internal"
        question.global_constant = True
    answer_type = ir.FunctionType(ir.IntType(32), [letter.as_pointer()])
    reflect = module.globals.get("__nvvm_reflect") or ir.Function(module, answer_type, "__nvvm_reflect")
    pointer = builder.bitcast(builder.addrspacecast(question, question.value_type.as_pointer()), letter.as_pointer())
    architecture = builder.call(reflect, [pointer])
    return builder.icmp_signed(">=", architecture, ir.Constant(architecture.type, 100 * major + 10 * minor))


def from_capability(builder, major, minor):
    """A context: what is built in it is compiled for this compute capability and later ones only."""
    # What is not reached is dropped.
    return builder.if_then(at_least(builder, major, minor))


def control(text, since=None):
    """A device function of no arguments: instructions that memory accesses are not moved across.

    ``since``: the compute capability before which it does nothing.
    """

    @intrinsic
    def instructions(typingctx):
        def codegen(context, builder, signature, args):
            with from_capability(builder, *since) if since else nullcontext():
                assembly(builder, ir.VoidType(), [], text, "~{memory}")
            return context.get_dummy_value()

        return types.void(), codegen

    return instructions
