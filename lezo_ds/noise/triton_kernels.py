"""The noise operations as Triton kernels: the formulas of docs/file-formats.md, rearranged.

One launch works on many tensors. A table on the GPU says where they are and which programs (thread
blocks) work on which. It is int64 [12, num_columns], with a column for each tensor:

    row             tensor 0   tensor 1          unused columns
    FIRST_PROGRAM   0          programs of 0     more than any number of programs
    PARAMETER_ID
    COUNT                                        number of elements; with rows_ptr, those of a row
    ADDRESS                                      of theta, or of the values to update
    START                                        of the tensor's `Region`, as two more
    WIDTH
    STRIDE
    COPY_OFFSET                                  perturb: bytes from out_ptr to the copy for plus
    COPY_IS_FP32                                 perturb: 1 for copies in fp32, 0 in out_dtype
    TILES_OF_ROW                                 perturb with rows_ptr: programs of one row
    LOW_ADDRESS                                  update: of low bits, or of the grid of codes
    NUM_GROUPS                                   update: columns of the grid

A program handles one tile: the elements of consecutive blocks of Philox. Its number less
FIRST_PROGRAM is the number of its tile in its tensor. `layout` says how tiles lie:

    aligned        one row of elements, which begins where a block begins
    any            one row, which may begin within a block: the tile's first elements are masked
    aligned rows   a rectangle, each of whose rows is whole blocks
    rows           a rectangle, each of whose rows begins within a block of its own

Compiled for compute capability 9.0, "aligned" with `unit` 16 takes 59 instructions for each element
of a perturbed copy in bf16, "any" 79, and "aligned" with `unit` 1 76.

Launch them with enable_fp_fusion=False: the bits equal those of the other backends only if every
fp32 operation is rounded on its own. Outside `_root`, tl.fma stands only where the product is
exact. A hint such as tl.multiple_of must stand where the value is made: it does not leave a
function.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False
# mypy: disallow-incomplete-defs=False, disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 (a kernel has no objects to bundle its arguments in)

from __future__ import annotations

import triton
import triton.language as tl

# Triton 3.7's interpreter cuts bits off where a GPU rounds to the nearest bf16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# The rows of a table.
FIRST_PROGRAM = tl.constexpr(0)
PARAMETER_ID = tl.constexpr(1)
COUNT = tl.constexpr(2)
ADDRESS = tl.constexpr(3)
START = tl.constexpr(4)
WIDTH = tl.constexpr(5)
STRIDE = tl.constexpr(6)
COPY_OFFSET = tl.constexpr(7)
COPY_IS_FP32 = tl.constexpr(8)
TILES_OF_ROW = tl.constexpr(9)
LOW_ADDRESS = tl.constexpr(10)
NUM_GROUPS = tl.constexpr(11)
NUM_ROWS = tl.constexpr(12)

GROUP = tl.constexpr(64)  # elements of a column of a grid

NORMAL_STREAM = tl.constexpr(0)
DITHER_STREAM = tl.constexpr(1)
RADEMACHER_STREAM = tl.constexpr(2)
CODE_STREAM = tl.constexpr(3)


@triton.jit
def _bits(values):
    """Return the bit patterns of fp32 values as int32."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _from_bits(bits):
    """Return the fp32 values of 32-bit patterns."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _minus_two_log_uniform(word):
    """Return -2 ln u in fp32 for u = (2 (word >> 9) + 1) / 2**24, which is never 0 or 1."""
    # The constants are those of the logarithm times -2: a power of two changes no other bit.
    # 1 + k / 2**23 with k = word >> 9, less 1 - 2**-24, is u: all exact.
    uniform = _from_bits((word >> 9) | 0x3F800000) - 0.999999940395355224609375
    bits = _bits(uniform)
    # u = 2**e * m with m in (sqrt(1/2), sqrt(2)]; the first such m has the bits below.
    # `power` is e << 23: two constants below are divided by 2**23 instead.
    power = (bits - 0x3F3504F4) & -0x800000
    x = _from_bits(bits - power) - 1.0
    exponent = power.to(tl.float32)
    polynomial = x * -1.40753672584e-1 + 2.3029220620e-1
    polynomial = polynomial * x + -2.3353997480e-1
    polynomial = polynomial * x + 2.4840281692e-1
    polynomial = polynomial * x + -2.8498645574e-1
    polynomial = polynomial * x + 3.3336115330e-1
    polynomial = polynomial * x + -4.0001429530e-1
    polynomial = polynomial * x + 4.9999987986e-1
    polynomial = polynomial * x + -6.6666662348e-1
    square = x * x
    tail = polynomial * x * square + exponent * (4.24388880e-4 / 0x800000) + square
    return tl.fma(exponent, -1.38671875 / 0x800000, tl.fma(x, -2.0, tail))


@triton.jit
def _root(x):
    """Return the correctly rounded root of x in [2**-24, 64].

    It is sqrt.rn without its branch for other x.
    """
    if INTERPRETED:
        root = tl.sqrt_rn(x)
    else:
        inverse = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        root = x * inverse
        # Not -root, which Triton takes for 0 - root: one more instruction.
        root = tl.fma(tl.fma(root * -1.0, root, x), inverse * 0.5, root)
    return root


@triton.jit
def _radius(word, angle):
    """Return sqrt(-2 ln u) of `word`, negative if the first bit of `angle` is set.

    That bit stands for half a turn, which changes the signs of sine and cosine.
    """
    radius = _root(_minus_two_log_uniform(word)).to(tl.uint32, bitcast=True)
    return _from_bits(radius ^ (angle & 0x80000000))


@triton.jit
def _sin_cos(word):
    """Return (sine, cosine); the first bit of `word` counts as 0, since `_radius` has the sign."""
    x = (word << 2).to(tl.int32, bitcast=True).to(tl.float32) * 3.657291987e-10
    square = x * x
    sine = (square * -1.9515295891e-4 + 8.3321608736e-3) * square + -1.6666654611e-1
    sine = sine * square * x + x
    cosine = (square * 2.443315711809948e-5 + -1.388731625493765e-3) * square + 4.166664568298827e-2
    cosine = tl.fma(square, -0.5, cosine * (square * square)) + 1.0
    odd = (word & 0x40000000) != 0
    # Not -sine, which Triton takes for 0 - sine: it is not -0 where the sine is 0.
    return tl.where(odd, cosine, sine), tl.where(odd, sine * -1.0, cosine)


@triton.jit
def _product(word, factor: tl.constexpr):
    """Return the high and the low half of word * factor.

    They take one instruction, where LLVM often chooses two.
    """
    if INTERPRETED:
        product = word.to(tl.uint64) * factor
        low = product.to(tl.uint32)
        high = (product >> 32).to(tl.uint32)
    else:
        low, high = tl.inline_asm_elementwise(
            "{.reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$0, $1}, product;}",
            "=r,=r,r,r",
            [word, tl.full([], factor, tl.uint32)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    return high, low


@triton.jit
def _words(key, parameter_id, block, stream: tl.constexpr):
    """Return the four words of Philox4x32-10 of each block, uint32 [n].

    tl.philox gives the same words, but takes two multiplications for each product.
    """
    word0 = block.to(tl.uint32)
    word1 = (block >> 32).to(tl.uint32)
    word2 = word0 * 0 + tl.cast(parameter_id, tl.uint32)
    word3 = word0 * 0 + stream
    key0 = key.to(tl.uint32)
    key1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _product(word0, 0xD2511F53)
        high1, low1 = _product(word2, 0xCD9E8D57)
        word0 = high1 ^ word1 ^ key0
        word1 = low1
        word2 = high0 ^ word3 ^ key1
        word3 = low0
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return word0, word1, word2, word3


@triton.jit
def _in_order(v0, v1, v2, v3):
    """Interleave [n] each into [n, 4]."""
    return tl.join(tl.join(v0, v2), tl.join(v1, v3)).reshape(v0.shape[0], 4)


@triton.jit
def box_muller(word0, word1, word2, word3):
    """Return the normals of blocks: fp32 [n, 4]."""
    radius01 = _radius(word0, word1)
    radius23 = _radius(word2, word3)
    sin01, cos01 = _sin_cos(word1)
    sin23, cos23 = _sin_cos(word3)
    return _in_order(radius01 * cos01, radius01 * sin01, radius23 * cos23, radius23 * sin23)


@triton.jit
def _draw(key, parameter_id, block, distribution: tl.constexpr):
    """Return z of all elements of the blocks: fp32 [n, elements of a block]."""
    if distribution == "rademacher":
        word0, word1, word2, word3 = _words(key, parameter_id, block, RADEMACHER_STREAM)
        words = _in_order(word0, word1, word2, word3)
        bits = words[:, :, None] >> tl.arange(0, 32).to(tl.uint32)[None, None, :]
        ones = (bits << 31) | 0x3F800000  # the bit becomes the sign bit of 1
        z = _from_bits(ones).reshape(block.shape[0], 4 * 32)
    else:
        word0, word1, word2, word3 = _words(key, parameter_id, block, NORMAL_STREAM)
        z = box_muller(word0, word1, word2, word3)
    return z


@triton.jit
def _dither(key, parameter_id, block, per_block: tl.constexpr, stream: tl.constexpr):
    """Return the dither words of all elements of blocks: int32 [n, per_block].

    The dither has blocks of 4, whatever the distribution: a block of 128 elements has 32 of them.
    """
    dither_blocks: tl.constexpr = per_block // 4
    numbers = block[:, None] * dither_blocks + tl.arange(0, dither_blocks)[None, :]
    dither_block = numbers.reshape(block.shape[0] * dither_blocks)
    word0, word1, word2, word3 = _words(key, parameter_id, dither_block, stream)
    words = _in_order(word0, word1, word2, word3).to(tl.int32, bitcast=True)
    return words.reshape(words.shape[0] // dither_blocks, per_block)


@triton.jit
def _round_nearest(value, dtype: tl.constexpr):
    """Return fp32 values in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = _bits(value)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value != value, 0x7FC0, rounded)
        stored = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        stored = value.to(dtype)
    return stored


@triton.jit
def _round_stochastic(value, dither, dtype: tl.constexpr):
    """Return fp32 values in bf16 or fp16, rounded at random (docs/file-formats.md, Updates)."""
    bits = _bits(value)
    if dtype == tl.bfloat16:
        rounded = (bits + (dither & 0xFFFF)) >> 16
        nan = 0x7FC0
    else:
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + (dither & 0x1FFF)) >> 13) - 0x1C000
        below = _from_bits(tl.minimum(magnitude, 0x38800000))
        fixed_point = (below * 17592186044416.0).to(tl.int32)  # 2**44
        subnormal = (fixed_point + (dither & 0xFFFFF)) >> 20
        rounded = tl.where(magnitude < 0x38800000, subnormal, tl.minimum(normal, 0x7C00))
        rounded = rounded | ((bits >> 31) << 15)
        nan = 0x7E00
    rounded = tl.where(value != value, nan, rounded)
    return rounded.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _low_unit(high):
    """Return the fp32 bits of one unit of `low`; 2**-15 of the last place of `high`."""
    power = _bits(high.to(tl.float32)) & 0x7F800000
    return tl.maximum(power, (127 - 14) << 23) - ((10 + 15) << 23)


@triton.jit
def _split_master(value, dtype: tl.constexpr):
    """Do as `low_bits.split_master`."""
    if dtype == tl.bfloat16:
        # A GPU's own NaN, 0x7FFFFFFF, would wrap to -0.0.
        bits = tl.where(value != value, 0x7FC00000, _bits(value))
        high_bits = (bits + 0x8000) >> 16
        low = (bits - (high_bits << 16)).to(tl.int16)
        high = high_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        # A GPU would convert a NaN to 0x7FFF.
        nan = tl.full([], 0x7E00, tl.int16).to(tl.float16, bitcast=True)
        high = tl.where(value != value, nan, value.to(tl.float16))
        per_unit = _from_bits((254 << 23) - _low_unit(high))
        lost = value - high.to(tl.float32)
        # The difference and its product are exact. Adding 1.5 * 2**23 rounds to an integer in the
        # low 16 bits. An infinite or undefined difference becomes 0.
        rounded = tl.maximum(tl.fma(lost, per_unit, 12582912.0), 0.0)
        low = _bits(rounded).to(tl.int16)
    return high, low


@triton.jit
def _join_master(high, low):
    """Return the fp32 values that `_split_master` split."""
    if high.dtype == tl.bfloat16:
        high_bits = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        value = _from_bits(high_bits + low.to(tl.int32))
    else:
        unit = _from_bits(_low_unit(high))
        value = tl.fma(low.to(tl.float32), unit, high.to(tl.float32))
    return value


@triton.jit
def _moved(code, step, minimum, factor, delta, dither):
    """Return codes of 8 bits after theta * factor - delta, rounded at random on their grid."""
    code = code.to(tl.float32)
    # Without a range, a group's elements stay equal.
    change = (code * step + minimum) * (factor - 1.0) - delta
    change = tl.where(step == 0.0, 0.0, tl.div_rn(change, tl.where(step == 0.0, 1.0, step)))
    size = tl.abs(change)
    size = tl.where(size < 256.0, size, 256.0)
    whole = size.to(tl.int32).to(tl.float32)  # tl.floor flushes denormals
    uniform = _from_bits(((dither >> 9) & 0x7FFFFF) | 0x3F800000) - 0.999999940395355224609375
    moves = whole + tl.where(uniform < size - whole, 1.0, 0.0)
    moved = tl.where(change < 0.0, code - moves, code + moves)
    return tl.minimum(tl.maximum(moved, 0.0), 255.0).to(tl.int32).to(tl.uint8)


@triton.jit
def _changed(
    stored,
    low,
    minimum,
    factor,
    delta,
    key,
    parameter_id,
    block,
    per_block: tl.constexpr,
    storage: tl.constexpr,
):
    """Return stored values and their low bits after theta * factor - delta, rounded once.

    Of codes, `low` is the steps.
    """
    if storage == "fp32_master":
        value = _join_master(stored, low) * factor - delta
        stored, low = _split_master(value, stored.dtype)
    elif storage == "stochastic":
        value = stored.to(tl.float32) * factor - delta
        dither = _dither(key, parameter_id, block, per_block, DITHER_STREAM)
        stored = _round_stochastic(value, dither, stored.dtype)
    elif storage == "codes":
        dither = _dither(key, parameter_id, block, per_block, CODE_STREAM)
        stored = _moved(stored, low, minimum, factor, delta, dither)
    else:
        stored = stored * factor - delta
    return stored, low


@triton.jit
def _column(table_ptr, num_columns: tl.constexpr):
    """Return where the column of this program's tensor begins: field F is F * num_columns later."""
    program = tl.program_id(0).to(tl.int64)
    first_programs = tl.load(table_ptr + tl.arange(0, num_columns))
    num_begun = tl.sum((first_programs <= program).to(tl.int32), axis=0)
    return table_ptr + num_begun - 1


@triton.jit
def _elements_of_row(
    tile, start, count, layout: tl.constexpr, per_block: tl.constexpr, num_blocks: tl.constexpr
):
    """Return the elements of a tile of one row.

    The row has `count` elements, of which the first is element `start` of the parameter.

    Returns:
        The tile's blocks [num_blocks], the positions of their elements from `start`, and a mask of
        those that belong to the row. Positions and mask are [num_blocks, per_block].
    """
    first = tile * num_blocks
    block = start // per_block + first + tl.arange(0, num_blocks)
    elements = tl.arange(0, num_blocks)[:, None] * per_block + tl.arange(0, per_block)[None, :]
    position = first * per_block + elements
    if layout == "aligned":
        inside = position < count
    else:
        position = position - start % per_block
        inside = (position >= 0) & (position < count)
    return block, position, inside


@triton.jit
def _elements_of_rectangle(
    tile, start, width, stride, count, per_block: tl.constexpr, num_blocks: tl.constexpr
):
    """Do as `_elements_of_row` for a rectangle: row i has `width` elements from start + i * stride.

    Tiles cut the sequence of all blocks that row 0 may touch, all that row 1 may touch, and so on.
    """
    blocks_of_row = (width + 2 * (per_block - 1)) // per_block  # that a row touches at most
    number = tile * num_blocks + tl.arange(0, num_blocks)
    row = number // blocks_of_row
    first = start + row * stride
    block = first // per_block + number % blocks_of_row
    column = (block * per_block - first)[:, None] + tl.arange(0, per_block)[None, :]
    position = (row * width)[:, None] + column
    return block, position, (column >= 0) & (column < width) & (position < count)


@triton.jit
def _elements(
    tile,
    column_ptr,
    count,
    layout: tl.constexpr,
    num_columns: tl.constexpr,
    per_block: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """Return the elements of a tile of the tensor in a column, as `_elements_of_row` does."""
    start = tl.load(column_ptr + START * num_columns)
    if layout == "aligned rows":
        blocks_of_row = tl.load(column_ptr + WIDTH * num_columns) // per_block
        stride = tl.load(column_ptr + STRIDE * num_columns) // per_block
        # In the tensor, rows follow each other. Only the tile's first block takes 64-bit divisions.
        first = tile * num_blocks
        block, position, inside = _elements_of_row(
            tile, first * 0, count, "aligned", per_block, num_blocks
        )
        place = (first % blocks_of_row).to(tl.int32) + tl.arange(0, num_blocks)
        rows_on = place // blocks_of_row.to(tl.int32)
        row = first // blocks_of_row + rows_on
        block = start // per_block + row * stride + place - rows_on * blocks_of_row
    elif layout == "rows":
        width = tl.load(column_ptr + WIDTH * num_columns)
        stride = tl.load(column_ptr + STRIDE * num_columns)
        block, position, inside = _elements_of_rectangle(
            tile, start, width, stride, count, per_block, num_blocks
        )
    else:
        block, position, inside = _elements_of_row(
            tile, start, count, layout, per_block, num_blocks
        )
    return block, position, inside


@triton.jit
def _store_copy(out_ptr, position, value, inside, is_fp32, out_dtype: tl.constexpr):
    if is_fp32 != 0:
        tl.store(out_ptr.to(tl.pointer_type(tl.float32)) + position, value, mask=inside)
    else:
        rounded = _round_nearest(value, out_dtype)
        tl.store(out_ptr.to(tl.pointer_type(out_dtype)) + position, rounded, mask=inside)


@triton.jit(do_not_specialize=["key"])
def perturb_kernel(
    table_ptr,
    rows_ptr,
    out_ptr,
    key: tl.uint64,
    scale: tl.float32,
    distance: tl.int64,
    dtype: tl.constexpr,
    out_dtype: tl.constexpr,
    two_signs: tl.constexpr,
    layout: tl.constexpr,
    unit: tl.constexpr,
    num_columns: tl.constexpr,
    distribution: tl.constexpr,
    per_block: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """Write plus = theta + scale * z and, with two signs, minus = theta - scale * z.

    Args:
        table_ptr: see the module. With `rows_ptr`, it has one tensor.
        rows_ptr: None, or int64: row i of plus is that of theta[rows[i]], in out_dtype.
        out_ptr: memory of all copies. A copy for minus lies `distance` bytes after that for plus.
        key: of the direction z.
        scale: of the direction z.
        distance: a multiple of 16.
        dtype: of theta.
        out_dtype: of the copies that are not fp32.
        two_signs: whether there is a copy for minus.
        layout: see the module; "aligned" or "any" with `rows_ptr`, for all rows.
        unit: 16 if COUNT, ADDRESS and COPY_OFFSET of all tensors are multiples of it, else 1. The
            compiler uses wide accesses where it sees multiples of 16.
        num_columns: of the table, a power of two.
        distribution: of the entries of z.
        per_block: elements of a block, 4 normals or 128 signs.
        num_blocks: of a tile. No bit depends on it.
    """
    column_ptr = _column(table_ptr, num_columns)
    tile = tl.program_id(0).to(tl.int64) - tl.load(column_ptr + FIRST_PROGRAM * num_columns)
    parameter_id = tl.load(column_ptr + PARAMETER_ID * num_columns)
    count = tl.multiple_of(tl.load(column_ptr + COUNT * num_columns), unit)
    address = tl.load(column_ptr + ADDRESS * num_columns)
    theta_ptr = tl.multiple_of(address.to(tl.pointer_type(dtype)), unit)
    copy_offset = tl.multiple_of(tl.load(column_ptr + COPY_OFFSET * num_columns), unit)
    if rows_ptr is None:
        is_fp32 = tl.load(column_ptr + COPY_IS_FP32 * num_columns)
        block, position, inside = _elements(
            tile, column_ptr, count, layout, num_columns, per_block, num_blocks
        )
    else:
        is_fp32 = 0
        tiles_of_row = tl.load(column_ptr + TILES_OF_ROW * num_columns)
        row = tile.to(tl.int32) // tiles_of_row.to(tl.int32)
        tile -= row.to(tl.int64) * tiles_of_row
        start = tl.load(rows_ptr + row) * count
        theta_ptr += start
        copy_offset += row * count * (out_dtype.primitive_bitwidth // 8)
        block, position, inside = _elements_of_row(
            tile, start, count, layout, per_block, num_blocks
        )
    theta = tl.load(theta_ptr + position, mask=inside).to(tl.float32)
    change = scale * _draw(key, parameter_id, block, distribution)
    plus_ptr = out_ptr + copy_offset
    _store_copy(plus_ptr, position, theta + change, inside, is_fp32, out_dtype)
    if two_signs:
        minus_ptr = plus_ptr + distance
        _store_copy(minus_ptr, position, theta - change, inside, is_fp32, out_dtype)


@triton.jit
def _grid_of(grid_ptr, num_groups, position, inside):
    """Return the steps and the minima of codes, fp32 of the shape of their positions."""
    step_ptr = grid_ptr + position // GROUP
    steps = tl.load(step_ptr, mask=inside, other=0.0).to(tl.float32)
    return steps, tl.load(step_ptr + num_groups, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_updates"])
def update_kernel(
    table_ptr,
    updates_ptr,
    num_updates: tl.int32,
    dtype: tl.constexpr,
    low_dtype: tl.constexpr,
    storage: tl.constexpr,
    layout: tl.constexpr,
    unit: tl.constexpr,
    num_columns: tl.constexpr,
    distribution: tl.constexpr,
    per_block: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """Do theta = theta * factor - coefficient * z in place, for each update in order.

    The tile stays in registers between the updates.

    Args:
        table_ptr: see the module.
        updates_ptr: uint64 [num_updates, 2], as `pack_updates` lays them out.
        num_updates: at least 1.
        dtype: of the values.
        low_dtype: of the low bits, or of the grid of codes.
        storage: how values are stored: "fp32", "codes", or the update precision of 16-bit values.
        layout: see the module.
        unit: 16 if COUNT, ADDRESS and LOW_ADDRESS of all tensors are multiples of it, else 1.
        num_columns: of the table, a power of two.
        distribution: of the entries of z.
        per_block: elements of a block, 4 normals or 128 signs.
        num_blocks: of a tile. No bit depends on it.
    """
    multipliers_ptr = updates_ptr.to(tl.pointer_type(tl.float32))
    column_ptr = _column(table_ptr, num_columns)
    tile = tl.program_id(0).to(tl.int64) - tl.load(column_ptr + FIRST_PROGRAM * num_columns)
    parameter_id = tl.load(column_ptr + PARAMETER_ID * num_columns)
    count = tl.multiple_of(tl.load(column_ptr + COUNT * num_columns), unit)
    block, position, inside = _elements(
        tile, column_ptr, count, layout, num_columns, per_block, num_blocks
    )
    address = tl.load(column_ptr + ADDRESS * num_columns)
    values_ptr = tl.multiple_of(address.to(tl.pointer_type(dtype)), unit) + position
    stored = tl.load(values_ptr, mask=inside)
    # A loop needs its variables before it, used or not.
    low = stored
    low_ptr = values_ptr
    minimum = stored
    if storage == "fp32_master":
        low_address = tl.multiple_of(tl.load(column_ptr + LOW_ADDRESS * num_columns), unit)
        low_ptr = tl.multiple_of(low_address.to(tl.pointer_type(low_dtype)), unit) + position
        low = tl.load(low_ptr, mask=inside)
    elif storage == "codes":
        low_address = tl.load(column_ptr + LOW_ADDRESS * num_columns)
        num_groups = tl.load(column_ptr + NUM_GROUPS * num_columns)
        grid_ptr = low_address.to(tl.pointer_type(low_dtype))
        low, minimum = _grid_of(grid_ptr, num_groups, position, inside)
    for update in range(num_updates):
        key = tl.load(updates_ptr + 2 * update)
        coefficient = tl.load(multipliers_ptr + 4 * update + 2)
        factor = tl.load(multipliers_ptr + 4 * update + 3)
        delta = coefficient * _draw(key, parameter_id, block, distribution)
        stored, low = _changed(
            stored, low, minimum, factor, delta, key, parameter_id, block, per_block, storage
        )
    tl.store(values_ptr, stored, mask=inside)
    if storage == "fp32_master":
        tl.store(low_ptr, low, mask=inside)


@triton.jit(do_not_specialize=["parameter_id", "first", "distance", "count", "rank"])
def entries_kernel(
    out_ptr,
    keys_ptr,
    parameter_id: tl.int64,
    first: tl.int64,
    distance: tl.int64,
    count: tl.int64,
    rank: tl.int32,
    distribution: tl.constexpr,
    per_block: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """Write the entries of directions of low rank (`Kernels.draw`).

    Program (run, tile) writes a tile of a run: of key run // rank and s = run % rank.

    Args:
        out_ptr: fp32 [number of keys * rank, count].
        keys_ptr: uint64, of the directions.
        parameter_id: of the matrix.
        first: element of the first entry for s = 0.
        distance: elements between the first entries for s and s + 1.
        count: entries of a run.
        rank: runs of a key.
        distribution: of the entries.
        per_block: elements of a block, 4 normals or 128 signs.
        num_blocks: of a tile. No bit depends on it.
    """
    run = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    start = first + run % rank * distance
    block, position, inside = _elements_of_row(tile, start, count, "any", per_block, num_blocks)
    key = tl.load(keys_ptr + run // rank)
    z = _draw(key, parameter_id, block, distribution)
    tl.store(out_ptr + run * count + position, z, mask=inside)


@triton.jit(
    do_not_specialize=[
        "parameter_id",
        "key",
        "start",
        "width",
        "stride",
        "tiles_of_row",
        "num_groups",
        "num_terms",
        "parameter_width",
        "first_row",
        "num_rows",
        "first_column",
        "num_columns",
    ]
)
def subtract_kernel(
    values_ptr,
    low_ptr,
    num_groups: tl.int64,
    rows_ptr,
    columns_ptr,
    factor: tl.float32,
    key: tl.uint64,
    parameter_id: tl.int64,
    start: tl.int64,
    width: tl.int64,
    stride: tl.int64,
    tiles_of_row: tl.int32,
    num_terms: tl.int32,
    parameter_width: tl.int32,
    first_row: tl.int64,
    num_rows: tl.int64,
    first_column: tl.int32,
    num_columns: tl.int64,
    storage: tl.constexpr,
    layout: tl.constexpr,
    unit: tl.constexpr,
    wraps_once: tl.constexpr,
    num_blocks: tl.constexpr,
):
    """Do theta = theta * factor - (sum of u * b over all terms) in place.

    Where a tile begins in the matrix takes one division of 64 bits. Those of its elements would
    take longer than all the rest.

    Args:
        values_ptr: theta, the elements of a region.
        low_ptr: int16, the low bits with "fp32_master"; the grid of codes; else any pointer.
        num_groups: columns of the grid.
        rows_ptr: u, fp32 [num_terms, num_rows].
        columns_ptr: b, fp32 [num_terms, num_columns].
        factor: of theta.
        key: of the dither.
        parameter_id: of the matrix.
        start: of the `Region`, as `width` and `stride`.
        width: see `start`.
        stride: see `start`.
        tiles_of_row: programs of one row of the region.
        num_terms: at least 1.
        parameter_width: columns of the full matrix.
        first_row: row of the full matrix at which u begins.
        num_rows: of u.
        first_column: column of the full matrix at which b begins.
        num_columns: of b.
        storage: how values are stored: "fp32", "codes", or the update precision of 16-bit values.
        layout: "aligned" if all rows of the region begin where a block begins, else "any".
        unit: 16 if `width` and the pointers to theta and low bits are multiples of it, else 1.
        wraps_once: whether a tile touches two rows of the full matrix at most.
        num_blocks: of a tile, of 4 elements each. No bit depends on it.
    """
    program = tl.program_id(0)
    region_row = program // tiles_of_row
    tile = (program % tiles_of_row).to(tl.int64)
    start += region_row * stride
    width = width // unit * unit  # the compiler takes no hint for an argument
    block, position, inside = _elements_of_row(tile, start, width, layout, 4, num_blocks)
    position += region_row * width
    first_element = (start // 4 + tile * num_blocks) * 4  # of the tile
    row = first_element // parameter_width - first_row
    column = (first_element % parameter_width).to(tl.int32)
    column += tl.arange(0, num_blocks)[:, None] * 4 + tl.arange(0, 4)[None, :]
    is_next_row = (column >= parameter_width).to(tl.int32)
    rows_on = is_next_row if wraps_once else column // parameter_width
    row += rows_on
    column -= rows_on * parameter_width + first_column
    delta = column.to(tl.float32) * 0.0
    for term in range(num_terms):
        u = tl.load(rows_ptr + term * num_rows + row, mask=inside)
        b = tl.load(columns_ptr + term * num_columns + column, mask=inside)
        delta += u * b
    values_ptr += position
    stored = tl.load(values_ptr, mask=inside)
    low = stored
    minimum = stored
    if storage == "fp32_master":
        low_ptr += position
        low = tl.load(low_ptr, mask=inside)
    elif storage == "codes":
        low, minimum = _grid_of(low_ptr, num_groups, position, inside)
    stored, low = _changed(
        stored, low, minimum, factor, delta, key, parameter_id, block, 4, storage
    )
    tl.store(values_ptr, stored, mask=inside)
    if storage == "fp32_master":
        tl.store(low_ptr, low, mask=inside)
