// The noise operations for CPUs: the formulas of docs/file-formats.md, vectorized by the compiler.
//
// Build with -ffp-contract=off and never with -ffast-math: the bits equal those of the other
// backends only if every fp32 operation is rounded on its own. Except for Philox, all hot loops run
// over plain arrays without branches, so that GCC turns them into SIMD code.
//
// The elements of a call are cut twice:
//
//     chunk   what a thread takes at a time: elements of one row, or whole rows
//     tile    what is drawn, then used, at a time: z of a tile stays in the L1 cache
//
// The file has, in this order: Philox; its words as normals and signs; storage formats; the loops
// over one row; threads; and the functions that cpu.py calls.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// cpu.py has the same numbers by the names of Python; a test compares them.
enum Distribution : int32_t { NORMAL = 0, RADEMACHER = 1 };
enum Precision : int32_t { STOCHASTIC = 0, FP32_MASTER = 1 };
enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// The last word of Philox's counter: each use of a key has its own numbers.
enum Stream : uint32_t { NORMAL_STREAM = 0, DITHER_STREAM = 1, RADEMACHER_STREAM = 2 };

// Loops over blocks run to a multiple of this, so that no remainder follows the SIMD code.
constexpr int BLOCK_MULTIPLE = 16;
constexpr int TILE_BLOCKS = 256;       // of 4 elements
constexpr int TILE = 4 * TILE_BLOCKS;  // elements
constexpr int64_t CHUNK = 64 * TILE;   // elements

template <typename To, typename From>
inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// A word of each of several blocks, in the low half of 64 bits; the high halves are undefined. The
// processor's 32 x 32 -> 64 bit multiplication expects this layout, and GCC does not choose it by
// itself.
#if defined(__AVX512F__)
typedef uint64_t Lanes __attribute__((vector_size(64)));
inline Lanes product(Lanes a, Lanes b) {
    return (Lanes)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__)
typedef uint64_t Lanes __attribute__((vector_size(32)));
inline Lanes product(Lanes a, Lanes b) {
    return (Lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
#else
typedef uint64_t Lanes __attribute__((vector_size(16)));
inline Lanes product(Lanes a, Lanes b) { return (a & 0xFFFFFFFFu) * b; }
#endif

constexpr int NUM_LANES = sizeof(Lanes) / sizeof(uint64_t);
static_assert(BLOCK_MULTIPLE % NUM_LANES == 0);

struct Noise {
    int distribution;
    uint64_t key;
    uint32_t parameter_id;

    // A block has 2**block_bits elements: its four words are 4 normals or 128 signs.
    int block_bits() const { return distribution == NORMAL ? 2 : 7; }
};

// The four words of Philox4x32-10 (Salmon et al. 2011) of consecutive blocks, from `block` on.
//
//     word[j][i]   word j of block i, in the low half of 64 bits
struct alignas(64) TileWords {
    uint64_t word[4][TILE_BLOCKS];

    uint32_t at(int j, int i) const { return static_cast<uint32_t>(word[j][i]); }

    TileWords(Noise noise, Stream stream, uint64_t block, int num_blocks) {
        Lanes lane;
        for (int i = 0; i < NUM_LANES; ++i) lane[i] = static_cast<uint64_t>(i);
        const Lanes zero = lane ^ lane;
        for (int i = 0; i < num_blocks; i += NUM_LANES) {
            const Lanes counter = lane + (block + static_cast<uint64_t>(i));
            Lanes c0 = counter;
            Lanes c1 = counter >> 32;
            Lanes c2 = zero + noise.parameter_id;
            Lanes c3 = zero + static_cast<uint32_t>(stream);
            uint32_t k0 = static_cast<uint32_t>(noise.key);
            uint32_t k1 = static_cast<uint32_t>(noise.key >> 32);
            for (int round = 0; round < 10; ++round) {
                const Lanes product0 = product(c0, zero + 0xD2511F53u);
                const Lanes product1 = product(c2, zero + 0xCD9E8D57u);
                c0 = (product1 >> 32) ^ c1 ^ (zero + k0);
                c1 = product1;
                c2 = (product0 >> 32) ^ c3 ^ (zero + k1);
                c3 = product0;
                k0 += 0x9E3779B9u;
                k1 += 0xBB67AE85u;
            }
            const Lanes words[] = {c0, c1, c2, c3};
            for (int j = 0; j < 4; ++j) std::memcpy(&word[j][i], &words[j], sizeof(Lanes));
        }
    }
};

// The formulas of docs/file-formats.md with fewer operations. The constants are those of the
// logarithm times -2: a power of two changes no other bit of a result.
inline float minus_two_log_uniform(uint32_t word) {
    // 1 + k / 2**23 with k = word >> 9, less 1 - 2**-24, is u: all exact.
    const float uniform = bit_cast<float>((word >> 9) | 0x3F800000u) - 0.999999940395355224609375f;
    const int32_t bits = bit_cast<int32_t>(uniform);
    // u = 2**e * m with m in (sqrt(1/2), sqrt(2)]; the first such m has the bits below.
    // `power` is e << 23: two constants below are divided by 2**23 instead.
    const int32_t power = (bits - 0x3F3504F4) & -0x800000;
    const float x = bit_cast<float>(bits - power) - 1.0f;
    const float exponent = static_cast<float>(power);
    float polynomial = -1.40753672584e-1f;
    for (const float coefficient :
         {2.3029220620e-1f, -2.3353997480e-1f, 2.4840281692e-1f, -2.8498645574e-1f,
          3.3336115330e-1f, -4.0001429530e-1f, 4.9999987986e-1f, -6.6666662348e-1f})
        polynomial = polynomial * x + coefficient;
    const float square = x * x;
    const float tail = polynomial * x * square + exponent * (4.24388880e-4f / 0x1p23f) + square;
    return (x * -2.0f + tail) + exponent * (-1.38671875f / 0x1p23f);
}

// sqrt(-2 ln u) of `word`, with the sign that half a turn of `angle` gives to sine and cosine.
inline float signed_radius(uint32_t word, uint32_t angle) {
    const float radius = std::sqrt(minus_two_log_uniform(word));
    return bit_cast<float>(bit_cast<uint32_t>(radius) ^ (angle & 0x80000000u));
}

struct SinCos {
    float sin, cos;
};

// The first bit of `word` counts as 0: `signed_radius` has the sign.
inline SinCos sin_cos(uint32_t word) {
    const float x = static_cast<float>(static_cast<int32_t>(word << 2)) * 3.657291987e-10f;
    const float square = x * x;
    const float sine_factor =
        (square * -1.9515295891e-4f + 8.3321608736e-3f) * square + -1.6666654611e-1f;
    const float sine = sine_factor * square * x + x;
    const float cosine_factor =
        (square * 2.443315711809948e-5f + -1.388731625493765e-3f) * square + 4.166664568298827e-2f;
    const float cosine = cosine_factor * (square * square) - square * 0.5f + 1.0f;
    const bool odd = (word & 0x40000000u) != 0;
    return {odd ? cosine : sine, odd ? -sine : cosine};
}

// Rounds a number of blocks up to BLOCK_MULTIPLE.
inline int full_vectors(int num_blocks) {
    return (num_blocks + BLOCK_MULTIPLE - 1) / BLOCK_MULTIPLE * BLOCK_MULTIPLE;
}

void fill_normals(float *__restrict__ z, Noise noise, uint64_t block, int num_blocks) {
    num_blocks = full_vectors(num_blocks);
    const TileWords words(noise, NORMAL_STREAM, block, num_blocks);
    for (int i = 0; i < num_blocks; ++i) {
        for (int j = 0; j < 4; j += 2) {
            const float radius = signed_radius(words.at(j, i), words.at(j + 1, i));
            const SinCos angle = sin_cos(words.at(j + 1, i));
            z[4 * i + j] = radius * angle.cos;
            z[4 * i + j + 1] = radius * angle.sin;
        }
    }
}

void fill_signs(float *__restrict__ z, Noise noise, uint64_t block, int num_blocks) {
    const TileWords words(noise, RADEMACHER_STREAM, block, num_blocks);
    for (int i = 0; i < num_blocks; ++i) {
        for (int j = 0; j < 4; ++j) {
            for (int bit = 0; bit < 32; ++bit) {
                const uint32_t sign = words.at(j, i) >> bit << 31;
                z[128 * i + 32 * j + bit] = bit_cast<float>(0x3F800000u | sign);  // 1 or -1
            }
        }
    }
}

// Draws z of the elements [element, element + length), which lie in one tile. Whole blocks are
// drawn; returns where in `buffer` the first element is.
const float *draw(float *buffer, Noise noise, int64_t element, int length) {
    const int bits = noise.block_bits();
    const int last_of_block = (1 << bits) - 1;
    const int offset = static_cast<int>(element & last_of_block);
    const uint64_t block = static_cast<uint64_t>(element >> bits);
    const int num_blocks = (offset + length + last_of_block) >> bits;
    if (noise.distribution == NORMAL) fill_normals(buffer, noise, block, num_blocks);
    else fill_signs(buffer, noise, block, num_blocks);
    return buffer + offset;
}

// The same for the words by which `stochastic` rounds: one for each element, 4 in a block.
const uint32_t *draw_dither(uint32_t *__restrict__ buffer, Noise noise, int64_t element,
                            int length) {
    const int offset = static_cast<int>(element % 4);
    const int num_blocks = full_vectors((offset + length + 3) / 4);
    const TileWords words(noise, DITHER_STREAM, static_cast<uint64_t>(element / 4), num_blocks);
    for (int i = 0; i < num_blocks; ++i)
        for (int j = 0; j < 4; ++j) buffer[4 * i + j] = words.at(j, i);
    return buffer + offset;
}

// Storage formats. `Stored` is how an element lies in memory. Conversions are those of PyTorch:
// `nearest` rounds ties to even. docs/file-formats.md describes `stochastic`, `split` and `join`.

constexpr uint32_t FP16_EXPONENT_OFFSET = 112u << 23;  // fp32's exponent bias minus fp16's
constexpr uint32_t SMALLEST_NORMAL_FP16 = 0x38800000;  // 2**-14 in fp32

struct Fp32 {
    using Stored = float;
    static float load(float stored) { return stored; }
    static float nearest(float value) { return value; }
};

struct Bf16 {
    using Stored = uint16_t;

    static float load(uint16_t stored) {
        return bit_cast<float>(static_cast<uint32_t>(stored) << 16);
    }

    static uint16_t nearest(float value) {
        const uint32_t bits = bit_cast<uint32_t>(value);
        const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
    }

    static uint16_t stochastic(float value, uint32_t dither) {
        const uint32_t rounded = (bit_cast<uint32_t>(value) + (dither & 0xFFFF)) >> 16;
        return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
    }

    static void split(float value, uint16_t &high, int16_t &low) {
        const uint32_t bits = value != value ? 0x7FC00000u : bit_cast<uint32_t>(value);
        high = static_cast<uint16_t>((bits + 0x8000) >> 16);
        low = static_cast<int16_t>(bits - (static_cast<uint32_t>(high) << 16));
    }

    static float join(uint16_t high, int16_t low) {
        const uint32_t low_bits = static_cast<uint32_t>(static_cast<int32_t>(low));
        return bit_cast<float>((static_cast<uint32_t>(high) << 16) + low_bits);
    }
};

struct Fp16 {
    using Stored = uint16_t;

    static float load(uint16_t stored) {
        const uint32_t magnitude = stored & 0x7FFF;
        const float integer = static_cast<float>(static_cast<int32_t>(magnitude));
        const uint32_t subnormal = bit_cast<uint32_t>(integer * 0x1p-24f);
        const uint32_t normal = (magnitude << 13) + FP16_EXPONENT_OFFSET;
        const uint32_t special = normal + FP16_EXPONENT_OFFSET;  // infinities and NaN
        const uint32_t not_subnormal = magnitude < 0x7C00 ? normal : special;
        const uint32_t bits = magnitude < 0x400 ? subnormal : not_subnormal;
        return bit_cast<float>(bits | (static_cast<uint32_t>(stored & 0x8000) << 16));
    }

    static uint16_t nearest(float value) {
        const uint32_t bits = bit_cast<uint32_t>(value);
        const uint32_t magnitude = bits & 0x7FFFFFFF;
        const uint32_t is_odd = (magnitude >> 13) & 1;
        const uint32_t normal = (magnitude - FP16_EXPONENT_OFFSET + 0xFFF + is_odd) >> 13;
        // The last place of 0.5 in fp32 is the spacing of fp16's subnormals, to which the sum is
        // therefore rounded.
        const float above_half = bit_cast<float>(magnitude) + 0.5f;
        const uint32_t subnormal = bit_cast<uint32_t>(above_half) - 0x3F000000;
        return finish(bits, magnitude, normal, subnormal);
    }

    static uint16_t stochastic(float value, uint32_t dither) {
        const uint32_t bits = bit_cast<uint32_t>(value);
        const uint32_t magnitude = bits & 0x7FFFFFFF;
        const uint32_t normal = (magnitude - FP16_EXPONENT_OFFSET + (dither & 0x1FFF)) >> 13;
        // The minimum only keeps the conversion of larger values, which are not subnormal, defined.
        const float below = bit_cast<float>(std::min(magnitude, SMALLEST_NORMAL_FP16));
        const uint32_t fixed_point = static_cast<uint32_t>(static_cast<int32_t>(below * 0x1p44f));
        return finish(bits, magnitude, normal, (fixed_point + (dither & 0xFFFFF)) >> 20);
    }

    static void split(float value, uint16_t &high, int16_t &low) {
        high = nearest(value);
        const float lost = value - load(high);
        const float units = lost * bit_cast<float>((254 - low_unit_exponent(high)) << 23);
        // Adding 1.5 * 2**23 rounds them to an integer in the low 16 bits of the sum.
        const uint32_t rounded = bit_cast<uint32_t>(units + 12582912.0f);
        low = static_cast<int16_t>((high & 0x7FFF) < 0x7C00 ? rounded : 0u);
    }

    static float join(uint16_t high, int16_t low) {
        const float unit = bit_cast<float>(low_unit_exponent(high) << 23);
        return load(high) + static_cast<float>(low) * unit;
    }

  private:
    // Chooses between the results for normal and subnormal numbers, and adds the sign of `bits`.
    // Every NaN becomes the same one: processors differ in the sign of those that they compute.
    static uint16_t finish(uint32_t bits, uint32_t magnitude, uint32_t normal,
                           uint32_t subnormal) {
        uint32_t stored = magnitude < SMALLEST_NORMAL_FP16 ? subnormal : std::min(normal, 0x7C00u);
        stored |= (bits >> 16) & 0x8000;
        return static_cast<uint16_t>(magnitude > 0x7F800000 ? 0x7E00u : stored);
    }

    // The biased fp32 exponent of one unit of `low`, which is 2**-15 of the last place of `high`.
    static uint32_t low_unit_exponent(uint16_t high) {
        const uint32_t exponent_fp16 = std::max((high >> 10) & 0x1Fu, 1u);
        const uint32_t exponent = exponent_fp16 + 112;  // fp32's bias minus fp16's
        return exponent - 10 - 15;
    }
};

// Calls body(position, length) for each tile of the elements [start, start + count); `position`
// counts from `start`. Tiles end where blocks end, so that no block is drawn for two of them.
template <typename Body>
void for_tiles(Noise noise, int64_t start, int64_t count, Body body) {
    const int64_t last_of_block = (1 << noise.block_bits()) - 1;
    for (int64_t position = 0; position < count;) {
        const int offset = static_cast<int>((start + position) & last_of_block);
        const int length = static_cast<int>(std::min<int64_t>(count - position, TILE - offset));
        body(position, length);
        position += length;
    }
}

// Perturbs consecutive elements, of which the first is element `start` of the parameter. `minus`
// may be null.
template <typename Theta, typename Out>
void perturb_range(const typename Theta::Stored *__restrict__ theta,
                   typename Out::Stored *__restrict__ plus,
                   typename Out::Stored *__restrict__ minus, int64_t start, int64_t count,
                   Noise noise, float scale) {
    alignas(64) float buffer[TILE];
    for_tiles(noise, start, count, [&](int64_t position, int length) {
        const float *z = draw(buffer, noise, start + position, length);
        for (int i = 0; i < length; ++i)
            plus[position + i] = Out::nearest(Theta::load(theta[position + i]) + scale * z[i]);
        if (minus == nullptr) return;
        for (int i = 0; i < length; ++i)
            minus[position + i] = Out::nearest(Theta::load(theta[position + i]) - scale * z[i]);
    });
}

// An update theta * factor - coefficient * z(key), as `pack_updates` lays it out.
struct Update {
    uint64_t key;
    float coefficient;
    float factor;
};

// Updates consecutive elements in place, of which the first is element `start` of the parameter.
// All updates change one tile before the next tile, so that the tile stays in the cache. `noise`
// lacks the key.
template <typename Storage>
void update_range(typename Storage::Stored *__restrict__ values, int16_t *__restrict__ low,
                  int precision, int64_t start, int64_t count, Noise noise, const Update *updates,
                  int64_t num_updates) {
    alignas(64) float buffer[TILE];
    alignas(64) uint32_t dither_buffer[TILE];
    for_tiles(noise, start, count, [&](int64_t position, int length) {
        auto *__restrict__ tile = values + position;
        for (const Update *update = updates; update < updates + num_updates; ++update) {
            noise.key = update->key;
            const float coefficient = update->coefficient;
            const float factor = update->factor;
            const float *z = draw(buffer, noise, start + position, length);
            if constexpr (std::is_same_v<Storage, Fp32>) {
                for (int i = 0; i < length; ++i)
                    tile[i] = tile[i] * factor - coefficient * z[i];
            } else if (precision == FP32_MASTER) {
                auto *__restrict__ tile_low = low + position;
                for (int i = 0; i < length; ++i) {
                    const float theta = Storage::join(tile[i], tile_low[i]);
                    Storage::split(theta * factor - coefficient * z[i], tile[i], tile_low[i]);
                }
            } else {
                const uint32_t *dither =
                    draw_dither(dither_buffer, noise, start + position, length);
                for (int i = 0; i < length; ++i) {
                    const float theta = Storage::load(tile[i]);
                    tile[i] = Storage::stochastic(theta * factor - coefficient * z[i], dither[i]);
                }
            }
        }
    });
}

// Copies the entries [element, element + count) of a parameter.
void copy_entries(float *out, Noise noise, int64_t element, int64_t count) {
    alignas(64) float buffer[TILE];
    for_tiles(noise, element, count, [&](int64_t position, int length) {
        const float *z = draw(buffer, noise, element + position, length);
        std::memcpy(out + position, z, static_cast<size_t>(length) * sizeof(float));
    });
}

typedef float Floats __attribute__((vector_size(sizeof(Lanes))));  // one register
constexpr int NUM_FLOATS = sizeof(Floats) / sizeof(float);

// Updates of low rank work on a strip of columns of a few rows at once. Their sums fill half of the
// registers: many sums hide the latency of each addition, and share the numbers that are read.
constexpr int ROWS_AT_ONCE = 4;
#if defined(__AVX512F__)
constexpr int STRIP_REGISTERS = 4;
#else
constexpr int STRIP_REGISTERS = 2;
#endif
constexpr int STRIP = STRIP_REGISTERS * NUM_FLOATS;  // columns
// Columns of which the dither is drawn at once; it fits a tile even if blocks begin before them.
constexpr int PIECE = TILE - 4 * BLOCK_MULTIPLE;
static_assert(PIECE % STRIP == 0);

struct alignas(64) Strip {
    float number[STRIP];
};

struct RowGroup {
    float number[ROWS_AT_ONCE];
};

// The sums over terms of u[t, row] * b[t, column], in the order of the terms.
//
//     delta     a strip of each row
//     u, b      of each term
inline void add_terms(Strip *__restrict__ delta, const RowGroup *__restrict__ u,
                      const Strip *__restrict__ b, int64_t num_terms) {
    Floats sums[ROWS_AT_ONCE][STRIP_REGISTERS] = {};
    for (int64_t term = 0; term < num_terms; ++term) {
#pragma GCC unroll 4
        for (int k = 0; k < STRIP_REGISTERS; ++k) {
            Floats columns;
            std::memcpy(&columns, b[term].number + k * NUM_FLOATS, sizeof columns);
            // GCC would read b from memory again for each row, and be slower.
#if defined(__AVX512F__)
            asm("" : "+v"(columns));
#elif defined(__AVX2__)
            asm("" : "+x"(columns));
#endif
#pragma GCC unroll 4
            for (int row = 0; row < ROWS_AT_ONCE; ++row)
                sums[row][k] += u[term].number[row] * columns;
        }
    }
    // Without loops, the sums can stay in registers until they are used.
#pragma GCC unroll 4
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
#pragma GCC unroll 4
        for (int k = 0; k < STRIP_REGISTERS; ++k)
            std::memcpy(delta[row].number + k * NUM_FLOATS, &sums[row][k], sizeof(Floats));
    }
}

// Stores theta * factor - delta in place. `low` is null unless 16-bit values are stored as
// FP32_MASTER; `dither` is used if they are stored as STOCHASTIC.
template <typename Storage>
inline void subtract_elements(typename Storage::Stored *__restrict__ values,
                              int16_t *__restrict__ low, const uint32_t *__restrict__ dither,
                              int length, float factor, const float *__restrict__ delta) {
    if constexpr (std::is_same_v<Storage, Fp32>) {
        for (int i = 0; i < length; ++i) values[i] = values[i] * factor - delta[i];
    } else if (low != nullptr) {
        for (int i = 0; i < length; ++i) {
            const float theta = Storage::join(values[i], low[i]);
            Storage::split(theta * factor - delta[i], values[i], low[i]);
        }
    } else {
        for (int i = 0; i < length; ++i) {
            const float theta = Storage::load(values[i]);
            values[i] = Storage::stochastic(theta * factor - delta[i], dither[i]);
        }
    }
}

// Asks for the numbers of a strip, which the processor does not foresee: several rows take turns,
// and sums of many terms lie between.
template <typename Number>
inline void prefetch_strip(const Number *number) {
#pragma GCC unroll 4
    for (int i = 0; i < STRIP; i += 64 / sizeof(Number)) __builtin_prefetch(number + i, 1);
}

// Consecutive elements of a row that an update of low rank changes.
template <typename Storage>
struct RowPart {
    int begin, end;  // columns, counted from the first of the piece; none if begin >= end
    typename Storage::Stored *values;
    int16_t *low;            // null unless FP32_MASTER
    const uint32_t *dither;  // null unless STOCHASTIC

    // For columns from `column` on, of which `delta` is given.
    inline void subtract(int column, int length, float factor, const float *delta) const {
        const int first = column - begin;
        subtract_elements<Storage>(values + first, low == nullptr ? nullptr : low + first,
                                   dither == nullptr ? nullptr : dither + first, length, factor,
                                   delta);
    }

    inline void prefetch(int column) const {
        prefetch_strip(values + (column - begin));
        if (low != nullptr) prefetch_strip(low + (column - begin));
    }
};

// The numbers of b, [num_terms, num_columns], in the order in which `add_terms` reads them:
// [strips, num_terms], the last ones filled up with zeros.
std::vector<Strip> strips_of(const float *columns, int64_t num_terms, int64_t num_columns) {
    const int64_t num_strips = (num_columns + STRIP - 1) / STRIP;
    std::vector<Strip> strips(static_cast<size_t>(num_strips * num_terms));
    for (int64_t term = 0; term < num_terms; ++term) {
        for (int64_t first = 0; first < num_columns; first += STRIP) {
            const int64_t count = std::min<int64_t>(STRIP, num_columns - first);
            std::memcpy(strips[first / STRIP * num_terms + term].number,
                        columns + term * num_columns + first,
                        static_cast<size_t>(count) * sizeof(float));
        }
    }
    return strips;
}

// The numbers of u of some rows for each term; `rows` is [num_terms, distance]. What lies beyond
// `num_rows` is not used.
void copy_rows(RowGroup *u, const float *rows, int num_rows, int64_t num_terms, int64_t distance) {
    for (int64_t term = 0; term < num_terms; ++term, rows += distance)
        for (int i = 0; i < ROWS_AT_ONCE; ++i) u[term].number[i] = rows[std::min(i, num_rows - 1)];
}

// Calls body(first, last) for pieces of at most `size` of [0, count), on up to `num_threads`
// threads, in the default floating-point environment: another library in the process may have set
// flush-to-zero, which would change bits.
template <typename Body>
void parallel_for(int64_t count, int64_t size, int num_threads, Body body) {
    const int64_t num_pieces = (count + size - 1) / size;
    std::atomic<int64_t> next_piece{0};
    const auto work = [&] {
        std::fenv_t environment;
        std::fegetenv(&environment);
        std::fesetenv(FE_DFL_ENV);
        for (int64_t piece; (piece = next_piece.fetch_add(1)) < num_pieces;)
            body(piece * size, std::min(count, (piece + 1) * size));
        std::fesetenv(&environment);
    };
    std::vector<std::thread> threads;
    const int64_t num_helpers = std::min<int64_t>(num_threads, num_pieces) - 1;
    try {
        for (int64_t i = 0; i < num_helpers; ++i) threads.emplace_back(work);
    } catch (const std::system_error &) {
        // No more threads are allowed; those that started do all pieces.
    }
    work();
    for (std::thread &thread : threads) thread.join();
}

// Calls body(row, first, last) for all elements of a region: columns [first, last) of the row. One
// long row is cut into chunks; of several rows, a thread takes whole ones.
template <typename Body>
void for_rows(int64_t num_rows, int64_t width, int num_threads, Body body) {
    if (num_rows == 1) {
        parallel_for(width, CHUNK, num_threads,
                     [&](int64_t first, int64_t last) { body(0, first, last); });
        return;
    }
    const int64_t rows_of_chunk = std::max<int64_t>(1, CHUNK / std::max<int64_t>(1, width));
    parallel_for(num_rows, rows_of_chunk, num_threads, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) body(row, 0, width);
    });
}

// Calls body with an object of the storage format's type, for which it is compiled.
template <typename Body>
void with_format(int32_t format, Body body) {
    switch (format) {
        case FLOAT32: return body(Fp32{});
        case BFLOAT16: return body(Bf16{});
        case FLOAT16: return body(Fp16{});
    }
}

}  // namespace

// What the functions below are called with. cpu.py reads the types and names of the fields here.

// The elements that a call works on: `num_rows` rows of `width` elements, which are contiguous in
// memory. In the full parameter, row i begins at element start + i * stride.
struct Call {
    int64_t num_rows;
    int64_t width;
    int64_t stride;
    int64_t start;
    uint32_t parameter_id;
    int32_t format;  // of theta
    int32_t distribution;
    int32_t num_threads;
};
static_assert(sizeof(Call) == 48);  // without padding, the fields of a derived structure follow

struct PerturbCall : Call {
    const void *theta;
    const int64_t *rows;  // null, or row i of the copies is that of row rows[i] of theta
    void *plus;
    void *minus;  // null without a second sign
    uint64_t key;
    float scale;
    int32_t out_format;
};

struct UpdateCall : Call {
    void *theta;
    int16_t *low;  // null unless 16-bit values are stored as FP32_MASTER
    const void *updates;
    int64_t num_updates;
    int32_t precision;  // of 16-bit values; fp32 values are stored as they are
};

struct EntriesCall : Call {
    float *out;  // [num_keys, num_rows, width]
    const uint64_t *keys;
    int64_t num_keys;
};

// The region is that of `low_rank.Matrix`, whose elements lie in memory as `Call` says.
struct SubtractCall : Call {
    void *theta;
    int16_t *low;          // null unless 16-bit values are stored as FP32_MASTER
    const float *rows;     // u, [num_terms, rows of the matrix]
    const float *columns;  // b, [num_terms, columns of the matrix]
    int64_t num_terms;
    int64_t num_matrix_rows;
    int64_t num_matrix_columns;
    int64_t first_row;
    int64_t first_column;
    int64_t parameter_width;
    uint64_t dither_key;
    float factor;
    int32_t precision;
};

extern "C" {

// The entries of the elements of a region, for each key.
void lezo_entries(const EntriesCall *call) {
    const int64_t num_runs = call->num_keys * call->num_rows;
    parallel_for(num_runs, 1, call->num_threads, [&](int64_t first, int64_t last) {
        for (int64_t run = first; run < last; ++run) {
            const uint64_t key = call->keys[run / call->num_rows];
            const Noise noise{call->distribution, key, call->parameter_id};
            const int64_t element = call->start + run % call->num_rows * call->stride;
            copy_entries(call->out + run * call->width, noise, element, call->width);
        }
    });
}

// theta = theta * factor - sum of u * b over all terms.
void lezo_subtract(const SubtractCall *call) {
    const Noise noise{call->distribution, call->dither_key, call->parameter_id};
    const int64_t num_terms = call->num_terms;
    const int64_t num_columns = call->num_matrix_columns;
    const std::vector<Strip> strips = strips_of(call->columns, num_terms, num_columns);
    const int64_t num_groups = (call->num_matrix_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int64_t num_pieces = (num_columns + PIECE - 1) / PIECE;
    if (num_groups * num_pieces == 0) return;  // a rank may have no element of a matrix
    with_format(call->format, [&](auto storage_tag) {
        using Storage = decltype(storage_tag);
        const bool is_fp32 = std::is_same_v<Storage, Fp32>;
        const bool is_stochastic = !is_fp32 && call->precision == STOCHASTIC;
        auto *theta = static_cast<typename Storage::Stored *>(call->theta);

        // The part of a row in the piece of `length` columns from `first_column` on. Rows and
        // columns count from the first of the matrix.
        const auto part_of = [&](int64_t row, int64_t first_column, int length, uint32_t *buffer) {
            const int64_t row_of_region = call->num_rows == 1 ? 0 : row;
            const int64_t start = call->start + row_of_region * call->stride;
            const int64_t element = (call->first_row + row) * call->parameter_width +
                                    call->first_column + first_column;
            const int64_t begin = std::clamp<int64_t>(start - element, 0, length);
            const int64_t end = std::clamp<int64_t>(start + call->width - element, 0, length);
            RowPart<Storage> part{};
            part.begin = static_cast<int>(begin);
            part.end = static_cast<int>(end);
            if (begin >= end) return part;
            const int64_t offset = row_of_region * call->width + element + begin - start;
            part.values = theta + offset;
            if (is_stochastic)
                part.dither = draw_dither(buffer, noise, element + begin, part.end - part.begin);
            else if (call->low != nullptr)
                part.low = call->low + offset;
            return part;
        };

        // A unit is a piece of a group of rows.
        const auto subtract = [&](int64_t first_unit, int64_t last_unit) {
            alignas(64) uint32_t dither[ROWS_AT_ONCE][TILE];
            RowPart<Storage> parts[ROWS_AT_ONCE];
            std::vector<RowGroup> u(static_cast<size_t>(num_terms));
            for (int64_t unit = first_unit; unit < last_unit; ++unit) {
                const int64_t piece = unit % num_pieces;
                const int64_t first_row = unit / num_pieces * ROWS_AT_ONCE;
                const int num_rows = static_cast<int>(
                    std::min<int64_t>(ROWS_AT_ONCE, call->num_matrix_rows - first_row));
                if (unit == first_unit || piece == 0)
                    copy_rows(u.data(), call->rows + first_row, num_rows, num_terms,
                              call->num_matrix_rows);
                const int64_t first_column = piece * PIECE;
                const int length =
                    static_cast<int>(std::min<int64_t>(PIECE, num_columns - first_column));
                bool is_whole = num_rows == ROWS_AT_ONCE;
                for (int i = 0; i < num_rows; ++i) {
                    parts[i] = part_of(first_row + i, first_column, length, dither[i]);
                    is_whole = is_whole && parts[i].begin == 0 && parts[i].end == length;
                }
                for (int column = 0; column < length; column += STRIP) {
                    const Strip *b = &strips[(first_column + column) / STRIP * num_terms];
                    Strip delta[ROWS_AT_ONCE];  // may stay in registers
                    if (is_whole && column + STRIP <= length) {
#pragma GCC unroll 4
                        for (const auto &part : parts) part.prefetch(column);
                        add_terms(delta, u.data(), b, num_terms);
#pragma GCC unroll 4
                        for (int i = 0; i < ROWS_AT_ONCE; ++i)
                            parts[i].subtract(column, STRIP, call->factor, delta[i].number);
                        continue;
                    }
                    add_terms(delta, u.data(), b, num_terms);
                    for (int i = 0; i < num_rows; ++i) {
                        const int begin = std::max(column, parts[i].begin);
                        const int end = std::min(column + STRIP, parts[i].end);
                        if (begin < end)
                            parts[i].subtract(begin, end - begin, call->factor,
                                              delta[i].number + (begin - column));
                    }
                }
            }
        };
        const int64_t elements_of_unit = ROWS_AT_ONCE * std::min<int64_t>(PIECE, num_columns);
        parallel_for(num_groups * num_pieces, std::max<int64_t>(1, CHUNK / elements_of_unit),
                     call->num_threads, subtract);
    });
}

// plus = theta + scale * z and, if it is not null, minus = theta - scale * z.
void lezo_perturb(const PerturbCall *call) {
    const Noise noise{call->distribution, call->key, call->parameter_id};
    const auto perturb = [&](auto theta_tag, auto out_tag) {
        using Theta = decltype(theta_tag);
        using Out = decltype(out_tag);
        const auto *theta = static_cast<const typename Theta::Stored *>(call->theta);
        auto *plus = static_cast<typename Out::Stored *>(call->plus);
        auto *minus = static_cast<typename Out::Stored *>(call->minus);
        const auto perturb_row = [&](int64_t row, int64_t first, int64_t last) {
            const int64_t source_row = call->rows == nullptr ? row : call->rows[row];
            const int64_t target = row * call->width + first;
            perturb_range<Theta, Out>(
                theta + source_row * call->width + first, plus + target,
                minus == nullptr ? nullptr : minus + target,
                call->start + source_row * call->stride + first, last - first, noise, call->scale);
        };
        for_rows(call->num_rows, call->width, call->num_threads, perturb_row);
    };
    with_format(call->format, [&](auto theta_tag) {
        with_format(call->out_format, [&](auto out_tag) { perturb(theta_tag, out_tag); });
    });
}

// theta = theta * factor - coefficient * z(key) for each update, in order.
void lezo_update(const UpdateCall *call) {
    const Noise noise{call->distribution, 0, call->parameter_id};
    const auto *updates = static_cast<const Update *>(call->updates);
    with_format(call->format, [&](auto storage_tag) {
        using Storage = decltype(storage_tag);
        auto *theta = static_cast<typename Storage::Stored *>(call->theta);
        const auto update_row = [&](int64_t row, int64_t first, int64_t last) {
            const int64_t target = row * call->width + first;
            update_range<Storage>(
                theta + target, call->low == nullptr ? nullptr : call->low + target,
                call->precision, call->start + row * call->stride + first, last - first, noise,
                updates, call->num_updates);
        };
        for_rows(call->num_rows, call->width, call->num_threads, update_row);
    });
}

}  // extern "C"
