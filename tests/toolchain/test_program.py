"""Reading the compiler's final program: small texts in its styles, by release and SoC."""

import re

import pytest

from megatron_ascend_moe.toolchain.program import Access, read_program

GM = "#hivm.address_space<gm>"
UB = "#hivm.address_space<ub>"
HEAD = "  func.func @kernel(%arg0: i64, %arg1: memref<?xi8>, %arg2: memref<?xi8>, %arg3: memref<?xbf16>, "
HEAD += "%arg4: memref<?xi32>, %arg5: memref<?xbf16>) attributes {hacc.entry} {\n"

# One row of arguments 0 and 2 a trip, double-buffered; a scalar of argument 1 inside the loop over columns; then a
# constant zero row stored to argument 2 in a loop of its own.
STRUCTURED = f"""module {{
  func.func private @load_gm_to_ubuf_1d_bfloat16_t(memref<?xbf16>)
{HEAD}    %c0_i64 = arith.constant 0 : i64
    %c64_i64 = arith.constant 64 : i64
    %c128_i64 = arith.constant 128 : i64
    %c32_i32 = arith.constant 32 : i32
    %0 = hivm.hir.pointer_cast(%c64_i64) : memref<32xbf16, {UB}>
    %1 = hivm.hir.pointer_cast(%c128_i64) : memref<32xbf16, {UB}>
    %2 = hivm.hir.pointer_cast(%c0_i64) : memref<32xbf16, {UB}>
    %3 = hivm.hir.pointer_cast(%c0_i64) : memref<0xf32, {UB}>
    %cast = memref.cast %2 : memref<32xbf16, {UB}> to memref<?xbf16, {UB}>
    call @broadcast_scalar_bfloat16_t_to_1d(%cst, %cast) : (bf16, memref<?xbf16, {UB}>) -> ()
    scf.for %arg6 = %a to %b step %c32_i32  : i32 {{
      %4 = arith.select %odd, %1, %0 : memref<32xbf16, {UB}>
      %reinterpret_cast = memref.reinterpret_cast %arg3 to offset: [%5], sizes: [32], strides: [1] : memref<?xbf16, {GM}>
      %6 = memref.load %reinterpret_cast_9[%c0] : memref<1xi32, strided<[1], offset: ?>, {GM}>
      func.call @load_gm_to_ubuf_1d_bfloat16_t(%reinterpret_cast, %4, %k) : (memref<?xbf16, {GM}>) -> ()
      func.call @vmuls_vs_1d_bfloat16_t(%4, %w, %4, %3) : (memref<?xbf16, {UB}>) -> ()
      %subview = memref.subview %4[0] [%7] [1] : memref<32xbf16, {UB}> to memref<?xbf16, {UB}>
      func.call @store_ubuf_to_gm_1d_bfloat16_t(%subview, %arg5, %k) : (memref<?xbf16, {UB}>) -> ()
    }}
    scf.for %arg7 = %a to %b step %n  : i32 {{
      func.call @store_ubuf_to_gm_1d_bfloat16_t(%cast, %arg5, %k) : (memref<?xbf16, {UB}>) -> ()
    }}
    return
  }}
}}
"""


def test_structured_programs():
    program = read_program(STRUCTURED)
    assert program.accesses == (
        Access("scalar_load", None, (), (32,)),
        Access("load", 0, (64, 128), (32,)),
        Access("store", 2, (64, 128), (32,)),
        Access("store", 2, (0,), (None,)),
    )
    assert program.vector_ops == 2
    assert program.constant_buffers == {0}
    assert program.count("load", "store") == 3
    assert program.scalars_in_column_loops(32) == 1 and program.scalars_in_column_loops(64) == 0
    assert program.single_buffered({0, 2}) == []
    assert program.read_back() == set()


def test_a_single_buffer_that_is_no_constant_is_told():
    program = read_program(STRUCTURED.replace("arith.select %odd, %1, %0", "memref.cast %0"))
    assert [access.kind for access in program.single_buffered({0, 2})] == ["load", "store"]
    assert program.single_buffered({1}) == []


def test_an_output_that_is_read_back_is_told():
    program = read_program(STRUCTURED.replace("memref.reinterpret_cast %arg3", "memref.reinterpret_cast %arg5"))
    assert program.read_back() == {2}


@pytest.mark.parametrize("lost", ["%unknown", "%n"])
def test_a_buffer_that_cannot_be_told_is_not_taken_for_two(lost):
    program = read_program(STRUCTURED.replace("arith.select %odd, %1, %0", f"memref.cast {lost}"))
    assert [access.buffers for access in program.single_buffered({0, 2})] == [(), ()]


# The same in structured operations, as ascendnpu-ir 1.0.0 writes it.
OPERATIONS = f"""module {{
{HEAD}    %c0_i64 = arith.constant 0 : i64
    %c64_i64 = arith.constant 64 : i64
    %c128_i64 = arith.constant 128 : i64
    %c32_i32 = arith.constant 32 : i32
    %0 = hivm.hir.pointer_cast(%c64_i64) : memref<32xbf16, {UB}>
    %1 = hivm.hir.pointer_cast(%c128_i64) : memref<32xbf16, {UB}>
    %2 = hivm.hir.pointer_cast(%c0_i64) : memref<32xbf16, {UB}>
    hivm.hir.vbrc ins(%cst : bf16) outs(%2 : memref<32xbf16, {UB}>)
    scf.for %arg6 = %a to %b step %c32_i32  : i32 {{
      %4 = arith.select %odd, %1, %0 : memref<32xbf16, {UB}>
      %reinterpret_cast = memref.reinterpret_cast %arg3 to offset: [%5], sizes: [32], strides: [1] : memref<?xbf16, {GM}>
      %6 = memref.load %reinterpret_cast_9[%c0] : memref<1xi32, strided<[1], offset: ?>, {GM}>
      %7 = memref.load %4[%c0] : memref<32xbf16, {UB}>
      hivm.hir.load ins(%reinterpret_cast : memref<?xbf16, {GM}>) outs(%4 : memref<32xbf16, {UB}>) pad_mode = <PadValue>
      hivm.hir.vmul ins(%4, %w : memref<32xbf16, {UB}>, bf16) outs(%4 : memref<32xbf16, {UB}>) temp_buffer(%2 : memref)
      hivm.hir.store ins(%4 : memref<32xbf16, {UB}>) outs(%arg5 : memref<?xbf16, {GM}>)
    }}
    scf.for %arg7 = %a to %b step %n  : i32 {{
      hivm.hir.store ins(%2 : memref<32xbf16, {UB}>) outs(%arg5 : memref<?xbf16, {GM}>)
      hivm.hir.copy ins(%2 : memref<32xbf16, {UB}>) outs(%0 : memref<32xbf16, {UB}>)
      hivm.hir.set_flag[<PIPE_V>, <PIPE_MTE3>, <EVENT_ID0>]
    }}
    return
  }}
}}
"""


def test_programs_of_structured_operations():
    program = read_program(OPERATIONS)
    assert program.accesses == (*read_program(STRUCTURED).accesses, Access("copy", None, (), (None,)))
    assert program.vector_ops == 2
    assert program.constant_buffers == {0}
    assert program.single_buffered({0, 2}) == []


BLOCKS = f"""module {{
{HEAD}    %0 = llvm.mlir.constant(64 : i64) : i64
    %1 = llvm.mlir.constant(128 : i64) : i64
    %2 = hivm.hir.pointer_cast(%0) : memref<32xbf16, {UB}>
    %3 = builtin.unrealized_conversion_cast %2 : memref<32xbf16, {UB}> to !llvm.struct<(ptr<6>)>
    %4 = hivm.hir.pointer_cast(%1) : memref<32xbf16, {UB}>
    %5 = builtin.unrealized_conversion_cast %4 : memref<32xbf16, {UB}> to !llvm.struct<(ptr<6>)>
    cf.br ^bb1(%n : i32)
  ^bb1(%6: i32):
    %7 = llvm.select %odd, %5, %3 : i1, !llvm.struct<(ptr<6>)>
    %8 = builtin.unrealized_conversion_cast %7 : !llvm.struct<(ptr<6>)> to memref<32xbf16, {UB}>
    %base_buffer, %offset, %sizes, %strides = memref.extract_strided_metadata %arg3 : memref<?xbf16, {GM}>
    %reinterpret_cast = memref.reinterpret_cast %base_buffer to offset: [%9], sizes: [32], strides: [1] : memref<bf16>
    call @load_gm_to_ubuf_1d_bfloat16_t(%reinterpret_cast, %8, %k) : (memref<?xbf16, {GM}>) -> ()
    call @copy_ubuf_to_ubuf_1d_bfloat16_t(%8, %8) : (memref<?xbf16, {UB}>) -> ()
    call @kernel_outlined_vf_0(%8) : (memref<?xbf16, {UB}>) -> ()
    cf.cond_br %10, ^bb1, ^bb2
  ^bb2:
    return
  }}
}}
"""


def test_programs_in_blocks():
    program = read_program(BLOCKS)
    assert program.accesses == (Access("load", 0, (64, 128), None), Access("copy", None, (), None))
    assert program.vector_ops == 1 and program.count("copy") == 1
    assert program.single_buffered({0}) == []
    assert len(read_program(BLOCKS.replace("llvm.select %odd, %5, %3", "memref.cast %3")).single_buffered({0})) == 1


def test_a_buffer_computed_in_a_loop_of_blocks_is_no_constant():
    """A store from a single buffer that a vector instruction fills anew in each round, and one that is filled before."""
    computed = BLOCKS.replace("llvm.select %odd, %5, %3", "memref.cast %3").replace(
        "    call @load_gm_to_ubuf_1d_bfloat16_t(%reinterpret_cast, %8, %k)", "    call @fill_vf(%8)"
    )
    store = f"    call @store_ubuf_to_gm_1d_bfloat16_t(%8, %arg5, %k) : (memref<?xbf16, {UB}>) -> ()\n"
    computed = computed.replace("    cf.cond_br", store + "    cf.cond_br")
    (single,) = read_program(computed).single_buffered({2})
    assert (single.kind, single.buffers) == ("store", (64,))
    before = re.sub(r"    call @(fill_vf|kernel_outlined_vf_0)\(%8\).*\n", "", computed)
    before = before.replace("    cf.br ^bb1", "    call @fill_vf(%3) : (memref<?xbf16>) -> ()\n    cf.br ^bb1")
    assert read_program(before).constant_buffers == {64}
    assert read_program(before).single_buffered({2}) == []
