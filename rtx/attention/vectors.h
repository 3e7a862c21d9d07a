// Vectors, products of small matrices and threads, for the kernels that native.py compiles.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

using Int = std::int64_t;

namespace {
#ifdef __AVX512F__
constexpr Int LANES = 16, TALL = 8, QUERIES = 64;  // whole tiles and whole vectors make a block
#else
constexpr Int LANES = 8, TALL = 6, QUERIES = 48;
#endif
constexpr Int WIDE = 2, TILES = QUERIES / TALL;  // TALL x WIDE vectors of sums stay in registers
constexpr Int AHEAD = 8, CHUNK = 96, SPAN = 768;  // rows fetched early, keys in the nearest cache, of a segment

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef std::int32_t IntVec __attribute__((vector_size(LANES * 4)));
#define UNROLL _Pragma("GCC unroll 8")  // or sums would live in memory

struct Matrix {
    float* data;
    Int length;  // floats from row to row
    float* at(Int row, Int column = 0) const { return data + row * length + column; }
    Matrix from(Int row, Int column = 0) const { return {at(row, column), length}; }
};

Int vectors(Int width) { return (width + LANES - 1) / LANES; }

inline Vec load(const float* x, Int n = LANES) {  // the first n floats, zeros behind them
    Vec y{};
    std::memcpy(&y, x, n >= LANES ? sizeof y : n * sizeof(float));
    return y;
}

inline void store(float* x, Vec y) { std::memcpy(x, &y, sizeof y); }
inline Vec keep(IntVec where, Vec x) { return (Vec)((IntVec)x & where); }  // zeros elsewhere, also for NaN

// c (+)= a b for M rows of a and c and `left` vectors of columns, N of which are summed in registers at a time; a is
// [M, depth], or [depth, M] where it is TURNED.
template <bool TURNED, int M, int N = WIDE>
__attribute__((noinline)) void product(Int left, Int depth, Matrix a, Matrix b, Matrix c, bool more) {
    for (; left >= N; left -= N, b = b.from(0, N * LANES), c = c.from(0, N * LANES)) {
        Vec sums[M][N], row[N];
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) sums[i][n] = more ? load(c.at(i, n * LANES)) : Vec{};
        for (Int k = 0; k < depth; k++) {
            UNROLL for (int n = 0; n < N; n++) row[n] = load(b.at(k, n * LANES));
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int n = 0; n < N; n++) sums[i][n] += (TURNED ? *a.at(k, i) : *a.at(i, k)) * row[n];
        }
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int n = 0; n < N; n++) store(c.at(i, n * LANES), sums[i][n]);
    }
    if constexpr (N > 1)
        if (left > 0) product<TURNED, M, N - 1>(left, depth, a, b, c, more);
}

// y = x^T; compilers make vectors of eight rows.
void transpose(Int columns, Matrix x, Matrix y) {
    for (Int i = 0; i < QUERIES; i += 8)
        for (Int d = 0; d < columns; d++)
            for (Int l = 0; l < 8; l++) *y.at(d, i + l) = *x.at(i + l, d);
}

// What OpenMP's `parallel` calls, in the library that torch has loaded. Its threads spin for milliseconds after each
// operation of torch; threads of our own would wait for their cores.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Lets workers, made of the problem, do its G groups on so many threads. Returns 0, or 1 where members or rows are not
// what they should be, or 2 without memory.
template <class Worker, class Problem>
int in_threads(Problem& problem, int threads) {
    struct Work {
        Problem& problem;
        std::atomic<Int> next{0};
        std::atomic<int> status{0};
    } work{problem};
    const auto one = [](void* data) {
        Work& work = *(Work*)data;
        try {
            Worker worker{work.problem};
            for (Int g = work.next++; g < work.problem.G; g = work.next++) worker.group(g);
        } catch (const std::out_of_range&) {
            work.status = 1;
        } catch (...) {
            work.status = 2;
        }
    };
    static const Parallel parallel = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (threads = (int)std::min<Int>(threads, problem.G); parallel && threads > 1) {
        parallel(one, &work, threads, 0);
    } else {
        std::vector<std::thread> crew;
        for (int i = 1; i < threads; i++) crew.emplace_back(one, &work);
        one(&work);
        for (auto& each : crew) each.join();
    }
    return work.status;
}

}  // namespace
