"""The noise operations as Triton kernels: the formulas of reference.py in fewer instructions.

Launch them with enable_fp_fusion=False: the bits equal those of the other backends only if every fp32
operation is rounded on its own. Outside `_root`, tl.fma stands only where the product is exact.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from __future__ import annotations

import triton
import triton.language as tl

# Triton 3.7's interpreter cuts bits off where a GPU rounds to the nearest bf16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _minus_two_log_uniform(word):
    # The constants are those of the logarithm times -2: a power of two changes no other bit of a result.
    # 1 + k / 2**23 with k = word >> 9, less 1 - 2**-24, is u: all exact.
    uniform = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    bits = uniform.to(tl.int32, bitcast=True)
    # u = 2**e * m with m in (sqrt(1/2), sqrt(2)]; the first such m has the bits below. e comes as e << 23.
    power = (bits - 0x3F3504F4) & -0x800000
    x, exponent = (bits - power).to(tl.float32, bitcast=True) - 1.0, power.to(tl.float32)
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
    """Return the correctly rounded root of x in [2**-24, 64]: sqrt.rn without its branch for other x."""
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
    """Return sqrt(-2 ln u) of `word`, with the sign that half a turn of `angle` gives to sine and cosine."""
    radius = _root(_minus_two_log_uniform(word)).to(tl.uint32, bitcast=True)
    return (radius ^ (angle & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _sin_cos(word):
    """Return (sine, cosine); the first bit of `word` counts as 0."""
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
    """Return the high and the low half of word * factor by one instruction, where LLVM often takes two."""
    if INTERPRETED:
        product = word.to(tl.uint64) * factor
        low, high = product.to(tl.uint32), (product >> 32).to(tl.uint32)
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
    """Return the four words of each block, uint32. tl.philox takes two multiplications for a product."""
    word0 = block.to(tl.uint32)
    word1 = (block >> 32).to(tl.uint32)
    word2 = word0 * 0 + tl.cast(parameter_id, tl.uint32)
    word3 = word0 * 0 + stream
    key0 = key.to(tl.uint32)
    key1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _product(word0, 0xD2511F53)
        high1, low1 = _product(word2, 0xCD9E8D57)
        word0, word1 = high1 ^ word1 ^ key0, low1
        word2, word3 = high0 ^ word3 ^ key1, low0
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
    word0, word1, word2, word3 = _words(
        key, parameter_id, block, 2 if distribution == "rademacher" else 0
    )
    if distribution == "rademacher":
        words = _in_order(word0, word1, word2, word3)
        bits = words[:, :, None] >> tl.arange(0, 32).to(tl.uint32)[None, None, :]
        ones = (bits << 31) | 0x3F800000  # the bit becomes the sign bit of 1
        z = ones.to(tl.float32, bitcast=True).reshape(block.shape[0], 128)
    else:
        z = box_muller(word0, word1, word2, word3)
    return z


@triton.jit
def _dither(key, parameter_id, block, per_block: tl.constexpr):
    """Return the dither words of all elements of blocks of a distribution: int32 [n, per_block]."""
    dither_blocks: tl.constexpr = per_block // 4
    first = block[:, None] * dither_blocks + tl.arange(0, dither_blocks)[None, :]
    block = first.reshape(block.shape[0] * dither_blocks)
    word0, word1, word2, word3 = _words(key, parameter_id, block, 1)
    words = _in_order(word0, word1, word2, word3).to(tl.int32, bitcast=True)
    return words.reshape(words.shape[0] // dither_blocks, per_block)


@triton.jit
def round_nearest(value, dtype: tl.constexpr):
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        stored = (
            tl.where(value != value, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
        )
    else:
        stored = value.to(dtype)
    return stored


@triton.jit
def _round_stochastic(value, dither, dtype: tl.constexpr):
    bits = value.to(tl.int32, bitcast=True)
    if dtype == tl.bfloat16:
        rounded = (bits + (dither & 0xFFFF)) >> 16
        nan = 0x7FC0
    else:
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + (dither & 0x1FFF)) >> 13) - 0x1C000
        below = tl.minimum(magnitude, 0x38800000).to(tl.float32, bitcast=True)
        subnormal = ((below * 17592186044416.0).to(tl.int32) + (dither & 0xFFFFF)) >> 20
        rounded = tl.where(magnitude < 0x38800000, subnormal, tl.minimum(normal, 0x7C00))
        rounded = rounded | ((bits >> 31) << 15)
        nan = 0x7E00
    return tl.where(value != value, nan, rounded).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _low_unit(high):
    """Return the fp32 bits of one unit of `low`; see `reference._low_unit_exponent`."""
    power = high.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(power, (127 - 14) << 23) - ((10 + 15) << 23)


@triton.jit
def _split_master(value, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        high_bits = (bits + 0x8000) >> 16
        low = (bits - (high_bits << 16)).to(tl.int16)
        high = high_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        high = value.to(tl.float16)
        per_unit = ((254 << 23) - _low_unit(high)).to(tl.float32, bitcast=True)
        # The difference and its product are exact. An infinite or undefined difference becomes 0.
        rounded = tl.maximum(tl.fma(value - high.to(tl.float32), per_unit, 12582912.0), 0.0)
        low = rounded.to(tl.int32, bitcast=True).to(tl.int16)
    return high, low


@triton.jit
def _join_master(high, low):
    if high.dtype == tl.bfloat16:
        bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low.to(tl.int32)
        value = bits.to(tl.float32, bitcast=True)
    else:
        unit = _low_unit(high).to(tl.float32, bitcast=True)
        value = tl.fma(low.to(tl.float32), unit, high.to(tl.float32))
    return value


@triton.jit
def _tile(tile, start, count, layout: tl.constexpr, distribution: tl.constexpr):
    """Return a tile's blocks [n], its elements' positions from `start`, and a mask of those that exist.

    Positions and mask are [n, elements of a block]. The layout "aligned" promises: `start` begins a block.
    """
    per_block: tl.constexpr = 128 if distribution == "rademacher" else 4
    num_blocks: tl.constexpr = 32 if distribution == "rademacher" else 512
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
def _tile_of_rows(tile, start, width, stride, count, distribution: tl.constexpr):
    """Do as `_tile` for a part of several rows: row i has `width` elements from start + i * stride."""
    per_block: tl.constexpr = 128 if distribution == "rademacher" else 4
    num_blocks: tl.constexpr = 32 if distribution == "rademacher" else 512
    blocks_of_row = (width + 2 * (per_block - 1)) // per_block  # that a row touches at most
    number = tile * num_blocks + tl.arange(0, num_blocks)
    row = number // blocks_of_row
    first = start + row * stride
    block = first // per_block + number % blocks_of_row
    column = (block * per_block - first)[:, None] + tl.arange(0, per_block)[None, :]
    position = (row * width)[:, None] + column
    return block, position, (column >= 0) & (column < width) & (position < count)


@triton.jit
def _part(table_ptr, unit: tl.constexpr, num_columns: tl.constexpr):
    """Return the number of this program's tile in its part of a call, and the other fields of the part.

    A table is int64 [9, num_columns], with a column for each part: number of its first program, parameter id,
    number of elements, address, two fields that depend on the kernel, and those of its `Region`. The third to
    fifth are multiples of `unit`: the compiler uses wide accesses where it sees multiples of 16.
    """
    program = tl.program_id(0).to(tl.int64)
    first = tl.load(table_ptr + tl.arange(0, num_columns))
    column = table_ptr + tl.sum((first <= program).to(tl.int32), axis=0) - 1
    parameter_id = tl.load(column + num_columns)
    count = tl.multiple_of(tl.load(column + 2 * num_columns), unit)
    address = tl.load(column + 3 * num_columns)
    other = tl.multiple_of(tl.load(column + 4 * num_columns), unit)
    last = tl.load(column + 5 * num_columns)
    return (
        program - tl.load(column),
        parameter_id,
        count,
        address,
        other,
        last,
        column + 6 * num_columns,
    )


@triton.jit
def _elements(
    tile,
    region_ptr,
    count,
    layout: tl.constexpr,
    num_columns: tl.constexpr,
    distribution: tl.constexpr,
):
    """Return `_tile` of a part whose region is in a column of the table."""
    start = tl.load(region_ptr)
    if layout == "rows":
        width, stride = tl.load(region_ptr + num_columns), tl.load(region_ptr + 2 * num_columns)
        block, position, inside = _tile_of_rows(tile, start, width, stride, count, distribution)
    else:
        block, position, inside = _tile(tile, start, count, layout, distribution)
    return block, position, inside


@triton.jit
def _store_copy(out_ptr, position, value, inside, is_fp32, out_dtype: tl.constexpr):
    if is_fp32 != 0:
        tl.store(out_ptr.to(tl.pointer_type(tl.float32)) + position, value, mask=inside)
    else:
        rounded = round_nearest(value, out_dtype)
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
):
    """Write plus = theta + scale * z and, if there are two signs, minus = theta - scale * z.

    plus is a part's fifth field of bytes after `out_ptr`, and minus `distance` bytes after plus. Without
    `rows_ptr`, the sixth says whether the copies are fp32 instead of `out_dtype`. With it, the only part has
    the elements of one row, row i of plus is that of theta[rows[i]], and the sixth is the tiles of a row.
    """
    tile, parameter_id, count, address, offset, last, region_ptr = _part(
        table_ptr, unit, num_columns
    )
    theta_ptr, is_fp32 = tl.multiple_of(address.to(tl.pointer_type(dtype)), unit), last
    if rows_ptr is None:
        block, position, inside = _elements(
            tile, region_ptr, count, layout, num_columns, distribution
        )
    else:
        row = tile.to(tl.int32) // last.to(tl.int32)
        tile -= row.to(tl.int64) * last
        start = tl.load(rows_ptr + row) * count
        theta_ptr += start
        offset += row * count * (out_dtype.primitive_bitwidth // 8)
        is_fp32 = 0
        block, position, inside = _tile(tile, start, count, layout, distribution)
    theta = tl.load(theta_ptr + position, mask=inside).to(tl.float32)
    change = scale * _draw(key, parameter_id, block, distribution)
    _store_copy(out_ptr + offset, position, theta + change, inside, is_fp32, out_dtype)
    if two_signs:
        _store_copy(
            out_ptr + offset + distance, position, theta - change, inside, is_fp32, out_dtype
        )


@triton.jit(do_not_specialize=["num_updates"])
def update_kernel(
    table_ptr,
    updates_ptr,
    num_updates: tl.int32,
    dtype: tl.constexpr,
    precision: tl.constexpr,
    layout: tl.constexpr,
    unit: tl.constexpr,
    num_columns: tl.constexpr,
    distribution: tl.constexpr,
):
    """Apply theta * factor - coefficient * z to shards in place, for each update of `pack_updates` in order.

    The fifth field of a part is the address of the low bits, if `precision` is fp32_master. The tile stays in
    registers between the updates.
    """
    multipliers_ptr = updates_ptr.to(tl.pointer_type(tl.float32))
    tile, parameter_id, count, address, low_address, _, region_ptr = _part(
        table_ptr, unit, num_columns
    )
    block, position, inside = _elements(tile, region_ptr, count, layout, num_columns, distribution)
    shard_ptr = tl.multiple_of(address.to(tl.pointer_type(dtype)), unit) + position
    low_ptr = tl.multiple_of(low_address.to(tl.pointer_type(tl.int16)), unit) + position
    stored = tl.load(shard_ptr, mask=inside)
    low = stored  # a loop needs its variables before it; unused unless `precision` is fp32_master
    if precision == "fp32_master":
        low = tl.load(low_ptr, mask=inside)
    for update in range(num_updates):
        key = tl.load(updates_ptr + 2 * update)
        coefficient = tl.load(multipliers_ptr + 4 * update + 2)
        factor = tl.load(multipliers_ptr + 4 * update + 3)
        z = _draw(key, parameter_id, block, distribution)
        if precision == "fp32_master":
            value = _join_master(stored, low) * factor - coefficient * z
            stored, low = _split_master(value, dtype)
        else:
            value = stored.to(tl.float32) * factor - coefficient * z
            if precision == "stochastic":
                stored = _round_stochastic(
                    value, _dither(key, parameter_id, block, z.shape[1]), dtype
                )
            else:
                stored = round_nearest(value, dtype)
    tl.store(shard_ptr, stored, mask=inside)
    if precision == "fp32_master":
        tl.store(low_ptr, low, mask=inside)
