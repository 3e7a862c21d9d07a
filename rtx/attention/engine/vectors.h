// What all kernels share: vectors, products of matrices, a thread's memory, and threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <vector>

using Int = std::int64_t;

namespace {
#ifdef __AVX512F__
constexpr Int LANES = 16, TALL = 8, BLOCK = 32;
#else
constexpr Int LANES = 8, TALL = 6, BLOCK = 48;
#endif
// LANES: floats of a vector. TALL x WIDE: vectors of sums in `product`, as many as stay in
// registers.
constexpr Int WIDE = 2, COLUMNS = WIDE * LANES;
constexpr int VECTORS = BLOCK / LANES;  // of the queries of a block
constexpr Int AHEAD = 8;                // how many rows early one is fetched from memory
constexpr Int SEGMENT = 512;            // query members of a segment

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef std::int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t BitVec __attribute__((vector_size(LANES * 4)));
#define UNROLL _Pragma("GCC unroll 8")  // without it, sums would live in memory

struct Matrix {
    float* data;
    Int length;  // floats from row to row
    float* at(Int row, Int column = 0) const { return data + row * length + column; }
    Matrix from(Int row, Int column = 0) const { return {at(row, column), length}; }
};

constexpr Int padded(Int n, Int to) { return (n + to - 1) / to * to; }

// The first n floats, and zeros behind them.
inline Vec load(const float* x, Int n = LANES) {
    Vec y{};
    std::memcpy(&y, x, n >= LANES ? sizeof y : std::max<Int>(0, n) * sizeof(float));
    return y;
}

inline void store(float* x, Vec y) { std::memcpy(x, &y, sizeof y); }

// x where `where` is set; zeros elsewhere, also for NaN.
inline Vec keep(IntVec where, Vec x) { return (Vec)((IntVec)x & where); }

inline float dot(const float* x, const float* y, Int n) {
    Vec sums{};
    for (Int d = 0; d < n; d += LANES) sums += load(x + d, n - d) * load(y + d, n - d);
    return std::accumulate((float*)&sums, (float*)&sums + LANES, 0.f);
}

inline void add(float* __restrict y, const float* __restrict x, float factor, Int n) {
    for (Int d = 0; d < n; d++) y[d] += factor * x[d];
}

constexpr float POLYNOMIAL[] = {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                5.0000001201e-1f, 1.f,              1.f};

// e^x to the last bits for x up to 80; NaN stays NaN. x = n log(2) + r, n whole, so e^x = 2^n e^r,
// and e^r is a polynomial (the constants are those of expf in Cephes). Zero below -64: beside a
// weight of 1 such weights are lost in any sum, and products with them may be denormal, which is
// slow.
inline Vec exponential(Vec x) {
    const Vec shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: n in the last bits
    const Vec n = shifted - 12582912.f;
    const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    for (float c : POLYNOMIAL) y = y * r + c;
    return keep(~(x < -64.f), y * (Vec)(((BitVec)shifted << 23) + 0x3f800000u));  // times 2^n
}

// c = a b, or c += a b if `more`, for TALL rows of c and whole multiples of COLUMNS columns; b is
// [depth, columns], and a is [TALL, depth], or [depth, TALL] if TURNED.
template <bool TURNED>
__attribute__((noinline)) void product(Int columns, Int depth, Matrix a, Matrix b, Matrix c,
                                       bool more = false) {
    for (Int d = 0; d < columns; d += COLUMNS) {
        Vec sums[TALL][WIDE], row[WIDE];
        UNROLL for (int i = 0; i < TALL; i++)
            UNROLL for (int n = 0; n < WIDE; n++)
                sums[i][n] = more ? load(c.at(i, d + n * LANES)) : Vec{};
        for (Int k = 0; k < depth; k++) {
            UNROLL for (int n = 0; n < WIDE; n++) row[n] = load(b.at(k, d + n * LANES));
            UNROLL for (int i = 0; i < TALL; i++)
                UNROLL for (int n = 0; n < WIDE; n++)
                    sums[i][n] += (TURNED ? *a.at(k, i) : *a.at(i, k)) * row[n];
        }
        UNROLL for (int i = 0; i < TALL; i++)
            UNROLL for (int n = 0; n < WIDE; n++) store(c.at(i, d + n * LANES), sums[i][n]);
    }
}

// y = x^T for the BLOCK rows of x and its first `columns` columns. Eight rows at a time, as
// compilers make vectors of such a loop.
void transpose(Int columns, Matrix x, Matrix y) {
    for (Int i = 0; i < BLOCK; i += 8)
        for (Int d = 0; d < columns; d++)
            for (Int l = 0; l < 8; l++) *y.at(d, i + l) = *x.at(i + l, d);
}

// A thread's memory: numbered rooms that grow to the largest matrix they have held, and are used
// again and again.
struct Rooms {
    std::vector<Vec> rooms[11];

    // A matrix in a room, which holds what was there before.
    Matrix room(int which, Int rows, Int length) {
        const std::size_t size = padded(rows * length, LANES) / LANES;
        if (rooms[which].size() < size) rooms[which].resize(size);
        return {(float*)rooms[which].data(), length};
    }
};

typedef std::int8_t Bytes __attribute__((vector_size(LANES)));

// Numbers that compare as floats do.
inline float score_of(std::uint32_t key) {
    const std::uint32_t bits = key >> 31 ? key ^ 1u << 31 : ~key;
    float score;
    std::memcpy(&score, &bits, sizeof score);
    return score;
}

inline std::uint32_t key_of(float score) {
    std::uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

// Computes the G groups of a problem on `threads` threads at most, each of which makes one Worker.
// The threads are those of OpenMP, which torch has loaded. Returns 0, or 1 if members or rows are
// out of range, or 2 if memory is short.
template <class Worker, class Problem>
int in_threads(Problem& problem, int threads) {
    std::atomic<Int> next{0};
    std::atomic<int> status{0};
#pragma omp parallel num_threads(std::clamp<Int>(problem.G, 1, threads))
    try {
        Worker worker{problem};
        for (Int g = next++; g < problem.G; g = next++) worker.group(g);
    } catch (const std::out_of_range&) {
        status = 1;
    } catch (...) {
        status = 2;
    }
    return status;
}

}  // namespace
