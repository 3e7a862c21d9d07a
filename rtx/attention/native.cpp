// Sparse softmax attention on a CPU, forward and backward, float32: native.py compiles and loads this file.
// Ranges: a query is a member p of a list and reads the key members start[p] <= m < stop[p] of the packed key list,
//     out[query_row[p]] += weight[p] * sum_m softmax_m(scale * q[query_row[p]] . k[key_row[m]]) v[key_row[m]].
// Index: row r reads the rows index[r, :], the valid ones first and -1 behind them.
// Backward, with P the softmax computed again, dP = dout . v and delta = sum_m P dP:
//     dS = P (dP - delta + dlse),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout.
//
// Rows, [R, D] or [R, Dv], belong to G groups (heads) of R / G rows. Group g has the query members head_begin[g] <= p <
// head_begin[g + 1] and touches its own rows alone; a thread takes whole groups, each in one order, so that no result
// depends on the number of threads. dk may be dq: then it is their sum.
//
// A segment is a run of queries that read close together, whose keys and values are packed once; a block is QUERIES of
// them, a tile TALL queries or keys of a block. Only tiles that meet are multiplied. Scores stand as [key, query]: each
// lane is a query, which takes its keys one after the other from the first, however segments, blocks and tiles fall.

#include <cmath>
#include <numeric>

#include "vectors.h"

// P query members, M key members, K columns of the index (-1: ranges). The forward pass has no dout and writes out and
// lse; the backward pass reads lse, may have no dlse, and writes the rest.
struct Problem {
    const float *q, *k, *v, *dout, *dlse, *weight;
    const Int *query_row, *key_row, *start, *stop, *head_begin, *index;
    float *out, *lse, *dq, *dk, *dv;
    Int G, R, P, M, K, D, Dv;
    float scale;
};

namespace {
inline float dot(const float* x, const float* y, Int n) {
    Vec sums{};
    for (Int d = 0; d < n; d += LANES) sums += load(x + d, n - d) * load(y + d, n - d);
    float total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    return total;
}

inline void add(float* __restrict y, const float* __restrict x, float factor, Int n) {
    for (Int d = 0; d < n; d++) y[d] += factor * x[d];
}

// e^x to the last bits for x up to 80; NaN stays NaN. Zero below -64: beside a weight of 1 such weights are lost in any
// sum, and products with them may be denormal, which is slow.
inline Vec exponential(Vec x) {
    const Vec shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the last bits are n, x / log(2) rounded
    const Vec n = shifted - 12582912.f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    for (float c : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.f, 1.f}) y = y * r + c;
    return keep(~(x < -64.f), y * (Vec)(((IntVec)shifted << 23) + 0x3f800000));  // times 2^n
}

// One thread's work, group after group.
struct Worker {
    const Problem& p;
    const Int ldk = vectors(p.D) * LANES, ldv = vectors(p.Dv) * LANES;
    Int low = 0, high = 0;                         // rows of the group
    Int base = 0, keys = 0;                        // the segment's key members: base <= m < base + keys
    Int begin = 0, end = 0;                        // those of the block; these and all below count from base
    Int tile_begin[TILES], tile_end[TILES];        // those of a tile of queries
    std::int32_t starts[QUERIES], stops[QUERIES];  // those of a query
    Matrix K{}, V{}, dK{}, dV{};                   // of the segment
    Matrix Q{}, QT{}, dQ{}, O{}, OT{}, S{}, dP{};  // of the block: scale * q, weight * dout (or outputs), weights, dS
    std::vector<Vec> rooms[11];

    void group(Int g) {
        low = g * (p.R / p.G), high = low + p.R / p.G;
        const auto clear = [&](float* x, Int width) { if (x) std::fill(x + low * width, x + high * width, 0.f); };
        clear(p.out, p.Dv), clear(p.dq, p.D), clear(p.dk, p.D), clear(p.dv, p.Dv);
        if (p.K >= 0)
            for (Int row = low; row < high; row++) index_row(row);
        else
            for (Int i = p.head_begin[g]; i < p.head_begin[g + 1];) i = segment(i, p.head_begin[g + 1]);
    }

    Matrix room(int which, Int rows, Int length) {
        if (const std::size_t size = vectors(rows * length); rooms[which].size() < size) rooms[which].resize(size);
        return {(float*)rooms[which].data(), length};
    }

    // Row rows[i] of x. Fetches one of those that come next, as rows lie anywhere and each would wait for memory.
    template <class T>
    T* at_row(T* x, Int width, const Int* rows, Int i, Int count) const {
        const Int next = rows[std::min(i + AHEAD, count - 1)];
        for (Int d = 0; d < width; d += 16) __builtin_prefetch(x + next * width + d);
        if (rows[i] < low || rows[i] >= high) throw std::out_of_range("a row of another group");
        return x + rows[i] * width;
    }

    // Copies rows, times a factor each, and puts zeros behind them up to `padded`.
    void pack(const float* x, Int width, const Int* rows, Int count, Int padded, float scale, const float* factor,
              Matrix to) const {
        for (Int i = 0; i < count; i++) {
            const float *from = at_row(x, width, rows, i, count), times = factor ? factor[i] : scale;
            for (Int d = 0; d < width; d += LANES) store(to.at(i, d), load(from + d, width - d) * times);
        }
        std::fill(to.at(count), to.at(padded), 0.f);
    }

    // Packs the keys of as many queries as read close together, does their blocks, and returns the next query.
    Int segment(Int first, Int limit) {
        Int last = first, top = 0;
        base = p.M;
        for (; last < limit; last++) {
            const Int a = p.start[last], b = p.stop[last], span = std::max(b, top) - std::min(a, base);
            if (a >= b) continue;
            if (a < 0 || b > p.M) throw std::out_of_range("a range beyond the key members");
            if (base < top && span > std::max(SPAN, (b - a) * 5 / 4)) break;
            base = std::min(a, base), top = std::max(b, top);
        }
        keys = std::max<Int>(0, top - base);
        const Int* rows = p.key_row + base;
        K = room(0, keys + TALL, ldk), V = room(1, keys + TALL, ldv);
        pack(p.k, p.D, rows, keys, keys + TALL, 1, nullptr, K), pack(p.v, p.Dv, rows, keys, keys + TALL, 1, nullptr, V);
        dK = room(2, p.dout ? keys + TALL : 0, ldk), dV = room(3, p.dout ? keys + TALL : 0, ldv);
        if (p.dout) std::fill(dK.data, dK.at(keys + TALL), 0.f), std::fill(dV.data, dV.at(keys + TALL), 0.f);
        for (Int i = first; i < last; i += QUERIES) block(i, std::min(QUERIES, last - i));
        for (Int m = 0; p.dout && m < keys; m++) add(at_row(p.dk, p.D, rows, m, keys), dK.at(m), 1, p.D);
        for (Int m = 0; p.dout && m < keys; m++) add(at_row(p.dv, p.Dv, rows, m, keys), dV.at(m), 1, p.Dv);
        return last;
    }

    void block(Int first, Int count) {
        const Int* rows = p.query_row + first;
        Q = room(4, QUERIES, ldk), QT = room(5, ldk, QUERIES), dQ = room(6, QUERIES, ldk);
        O = room(7, QUERIES, ldv), OT = room(8, ldv, QUERIES);
        pack(p.q, p.D, rows, count, QUERIES, p.scale, nullptr, Q);
        transpose(p.D, Q, QT);
        if (p.dout) pack(p.dout, p.Dv, rows, count, QUERIES, 1, p.weight + first, O), transpose(p.Dv, O, OT);
        std::fill_n(tile_begin, TILES, keys), std::fill_n(tile_end, TILES, 0);
        std::fill_n(starts, QUERIES, 0), std::fill_n(stops, QUERIES, 0);
        for (Int i = 0; i < count; i++) {
            const Int a = p.start[first + i] - base, b = p.stop[first + i] - base, t = i / TALL;
            if (a >= b) continue;
            starts[i] = (std::int32_t)a, stops[i] = (std::int32_t)b;
            tile_begin[t] = std::min(tile_begin[t], a), tile_end[t] = std::max(tile_end[t], b);
        }
        begin = *std::min_element(tile_begin, tile_begin + TILES), end = *std::max_element(tile_end, tile_end + TILES);
        const Int length = std::max<Int>(0, end - begin) + TALL;
        S = room(9, length, QUERIES), dP = room(10, p.dout ? length : 0, QUERIES);
        p.dout ? backward(first, count) : forward(first, count);
    }

    // Calls f(key, from, to) for tiles of keys; some of the queries from <= i < to, whole tiles, read them.
    template <class F>
    void each_tile(Int first, Int last, F f) const {
        for (Int key = first; key < std::min(last, end); key += TALL) {
            Int from = QUERIES, to = 0;
            for (Int t = 0, i = 0; t < TILES; t++, i += TALL)
                if (tile_begin[t] < key + TALL && tile_end[t] > key) from = std::min(from, i), to = i + TALL;
            if (from < to) f(key, from, to);
        }
    }

    // Calls f(sum, other, score, dP, who reads) for a tile of keys and the vectors of these queries.
    template <class F>
    void each_vector(Int key, Int from, Int to, float* sums, const float* others, F f) const {
        for (Int i = from / LANES * LANES; i < to; i += LANES) {
            Vec sum = load(sums + i), other = load(others + i);
            const IntVec start = (IntVec)load((float*)starts + i), stop = (IntVec)load((float*)stops + i);
            for (Int j = key; j < key + TALL; j++) {
                const IntVec at = IntVec{} + (std::int32_t)j;
                f(sum, other, S.at(j - begin, i), dP.at(j - begin, i), (start <= at) & (at < stop));
            }
            store(sums + i, sum);
        }
    }

    // scores[key, query] = x[key, :] . y[:, query] for a tile of keys and the vectors of these queries.
    void score(Int key, Int from, Int to, Int width, Matrix x, Matrix y, Matrix scores) const {
        const Int i = from / LANES * LANES;
        product<false, TALL>(vectors(to - i), width, x.from(key), y.from(0, i), scores.from(key - begin, i), false);
    }

    // y[query, :] (+)= sum of scores[key, query] x[key, :] over a chunk of keys.
    void gather(Int chunk, Int width, Matrix scores, Matrix x, Matrix y) const {
        for (Int t = 0, i = 0; t < TILES; t++, i += TALL) {
            const Int a = std::max(chunk, tile_begin[t]), b = std::min(chunk + CHUNK, tile_end[t]);
            if (a < b)
                product<true, TALL>(vectors(width), b - a, scores.from(a - begin, i), x.from(a), y.from(i),
                                    a > tile_begin[t]);
        }
    }

    // y[key, :] += sum of scores[key, query] x[query, :] over the queries, for a tile of keys.
    void scatter(Int key, Int from, Int to, Int width, Matrix scores, Matrix x, Matrix y) const {
        const Matrix weights = scores.from(key - begin, from);
        product<false, TALL>(vectors(width), to - from, weights, x.from(from), y.from(key), true);
    }

    void forward(Int first, Int count) {
        float most[QUERIES], total[QUERIES] = {};
        std::fill_n(most, QUERIES, -INFINITY);
        each_tile(begin, end, [&](Int key, Int from, Int to) {
            score(key, from, to, p.D, K, QT, S);
            each_vector(key, from, to, most, most, [](Vec& most, Vec, float* s, float*, IntVec reads) {
                most = (reads & (load(s) > most)) ? load(s) : most;  // passes over NaN, which comes with the sum
            });
        });
        for (Int chunk = begin; chunk < end; chunk += CHUNK) {
            each_tile(chunk, chunk + CHUNK, [&](Int key, Int from, Int to) {
                each_vector(key, from, to, total, most, [](Vec& total, Vec most, float* s, float*, IntVec reads) {
                    const Vec x = keep(reads, exponential(load(s) - most));
                    total += x, store(s, x);
                });
            });
            gather(chunk, p.Dv, S, V, O);
        }
        for (Int i = 0; i < count; i++) {
            p.lse[first + i] = most[i] + std::log(total[i]);  // -inf where nothing is read
            if (starts[i] < stops[i])
                add(at_row(p.out, p.Dv, p.query_row + first, i, count), O.at(i), p.weight[first + i] / total[i], p.Dv);
        }
    }

    void backward(Int first, Int count) {
        float lse[QUERIES] = {}, delta[QUERIES] = {};
        std::copy_n(p.lse + first, count, lse);
        each_tile(begin, end, [&](Int key, Int from, Int to) {
            score(key, from, to, p.D, K, QT, S), score(key, from, to, p.Dv, V, OT, dP);
            each_vector(key, from, to, delta, lse, [](Vec& delta, Vec lse, float* s, float* dp, IntVec reads) {
                const Vec x = keep(reads, exponential(load(s) - lse));
                delta += keep(reads, x * load(dp)), store(s, x);
            });
            scatter(key, from, to, p.Dv, S, O, dV);
        });
        for (Int i = 0; p.dlse && i < count; i++) delta[i] -= p.dlse[first + i];
        for (Int chunk = begin; chunk < end; chunk += CHUNK) {
            each_tile(chunk, chunk + CHUNK, [&](Int key, Int from, Int to) {
                each_vector(key, from, to, delta, delta, [](Vec&, Vec delta, float* s, float* dp, IntVec reads) {
                    store(dp, keep(reads, load(s) * (load(dp) - delta)));
                });
                scatter(key, from, to, p.D, dP, Q, dK);
            });
            gather(chunk, p.D, dP, K, dQ);
        }
        for (Int i = 0; i < count; i++)
            if (starts[i] < stops[i]) add(at_row(p.dq, p.D, p.query_row + first, i, count), dQ.at(i), p.scale, p.D);
    }

    // Either pass of a row that reads by index: rows share no keys worth packing. Inlined, `add` would be no vectors.
    __attribute__((noinline)) void index_row(Int row) {
        const Int* index = p.index + row * p.K;
        const Int count = std::find(index, index + p.K, -1) - index;
        const float *q = p.q + row * p.D, *dout = p.dout + row * p.Dv;
        float *s = room(0, 1, vectors(count) * LANES).data, *dp = room(1, 1, vectors(count) * LANES).data;
        for (Int j = 0; j < count; j++) s[j] = p.scale * dot(q, at_row(p.k, p.D, index, j, count), p.D);
        const float less = p.dout ? p.lse[row] : count ? *std::max_element(s, s + count) : 0;
        for (Int j = 0; j < count; j += LANES) store(s + j, exponential(load(s + j) - less));
        if (!p.dout) {
            const float total = std::accumulate(s, s + count, 0.f);
            p.lse[row] = less + std::log(total);
            for (Int j = 0; j < count; j++) add(p.out + row * p.Dv, p.v + index[j] * p.Dv, s[j] / total, p.Dv);
            return;
        }
        for (Int j = 0; j < count; j++) dp[j] = dot(dout, p.v + index[j] * p.Dv, p.Dv);
        for (Int j = 0; j < count; j++) add(p.dv + index[j] * p.Dv, dout, s[j], p.Dv);
        const float delta = dot(s, dp, count) - (p.dlse ? p.dlse[row] : 0);
        for (Int j = 0; j < count; j++) s[j] *= p.scale * (dp[j] - delta);
        for (Int j = 0; j < count; j++) add(p.dq + row * p.D, p.k + index[j] * p.D, s[j], p.D);
        for (Int j = 0; j < count; j++) add(p.dk + index[j] * p.D, q, s[j], p.D);
    }
};

}  // namespace

extern "C" int rtx_attend(const Problem* p, int threads) { return in_threads<Worker>(*p, threads); }
