// Sparse softmax attention on a CPU, forward and backward, float32.
//
// Which query reads which keys comes in one of two forms.
//
// By ranges (reads.py), query member p reads the key members start[p] <= m < stop[p] of the packed
// key list, except those where low[x, p] <= value[x, m] < high[x, p] for any x. Its output is
//     o[p] = sum_m softmax_m(scale * q[query_row[p]] . k[key_row[m]]) v[key_row[m]].
// With weights, outputs are by row, out[query_row[p]] += weight[p] * o[p]; without, by member,
// out[p] = o[p].
//
// By an index, row r reads the rows index[r, :], of which -1 is none.
//
// The backward pass computes the softmax P again, as e^(logit - lse). With dP = weight * dout . v
// and delta = sum_m P dP it is
//     dS = P (dP - delta + dlse),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout.
//
// Ranges may be *joined*: out[row] is one softmax over the keys of all query members of the row.
// The forward pass then has `row_lse`, the log-sums of rows; the backward pass has `delta`, and in
// lse the log-sums of the members' rows.
//
// The ranges are worked on in three steps, of which the upper ones hold the lower ones:
//     group     one head of one sequence. A thread takes whole groups, and computes each in one
//               order: no result depends on the number of threads.
//     segment   SEGMENT consecutive query members. The keys and values that they read are packed
//               (copied side by side).
//     block     BLOCK consecutive query members of a segment. Their scores are a matrix
//               [key, query], so that a vector holds one key's scores with LANES queries.
// Starts and stops never fall from query to query, so the pairs of a block that are read are a band
// of that matrix:
//
//     query  0 1 2 3 4 5
//     key 0  x x . . . .
//     key 1  x x x . . .
//     key 2  . x x x . .     Keys are worked on in tiles of TALL. With TALL = 2 the keys 2 and 3
//     key 3  . . x x x .     are a tile, which the queries 1 to 4 read (`first_reader`,
//     key 4  . . . . x x     `last_reader`).

#include "vectors.h"

// Sizes: R rows of G groups, P query members, M key members, X hidden ranges of values, K columns
// of the index (-1: there are ranges), D the head size of queries and keys, Dv that of values. A
// pointer that a pass does not need is null.
struct Problem {
    const float *q, *k, *v;          // [R, D], [R, D], [R, Dv]
    const float *dout, *dlse;        // gradients of out and lse; null in the forward pass
    const float* weight;             // [P], or null: outputs are by member
    const Int *query_row, *key_row;  // [P], [M]
    const Int *start, *stop;         // [P]
    const Int* head_begin;           // [G + 1]: the first query member of each group, and P
    const Int *value, *low, *high;   // [X, M], [X, P], [X, P]: numbers that int32 holds
    const Int* index;                // [R, K]
    float *out, *lse;     // written by the forward pass, which adds to out (zeros at first)
    float *dq, *dk, *dv;  // written by the backward pass; dk may be dq, which is then their sum
    const float* delta;   // [P], read by the backward pass of joined ranges, else null
    float* row_lse;       // [R], written by the forward pass of joined ranges, else null
    Int G, R, P, M, X, K, D, Dv;
    float scale;
};

namespace {
// One thread's attention, group after group.
struct Attention : Rooms {
    const Problem& p;
    const Int ldk = padded(p.D, COLUMNS), ldv = padded(p.Dv, COLUMNS);
    // Of the group: its rows.
    Int low = 0, high = 0;  // low <= row < high
    // Of the segment: its key members base <= m < base + keys, packed; all key numbers below count
    // from base.
    Int base = 0, keys = 0;
    Matrix K{}, V{}, dK{}, dV{};
    // Of the block: its first key, and where the range of each query starts and stops.
    Int begin = 0;
    std::int32_t starts[BLOCK], stops[BLOCK];
    Matrix Q{}, QT{};                 // scale * q, and transposed; in the end dq / scale
    Matrix O{}, OT{};                 // outputs; in the backward pass weight * dout, and transposed
    Matrix S{}, dP{};                 // [key, query]: scores, then weights; dP, then dS
    std::vector<IntVec> lows, highs;  // between which values are hidden, [X, queries]
    // Of a row that reads by index: the rows that it reads.
    std::vector<Int> reads;

    explicit Attention(const Problem& p) : p(p) {}

    void group(Int g) {
        low = g * (p.R / p.G);
        high = low + p.R / p.G;
        const auto clear = [&](float* x, Int width) {
            if (x) std::fill(x + low * width, x + high * width, 0.f);
        };
        clear(p.dq, p.D);
        clear(p.dk, p.D);
        clear(p.dv, p.Dv);
        if (p.row_lse) std::fill(p.row_lse + low, p.row_lse + high, -INFINITY);
        if (p.K >= 0)
            for (Int row = low; row < high; row++) index_row(row);
        else
            for (Int i = p.head_begin[g], end = p.head_begin[g + 1]; i < end; i += SEGMENT)
                segment(i, std::min(i + SEGMENT, end));
    }

    // Row rows[i] of x, or row i where rows is null; fails if it is of another group. Has the row
    // AHEAD of it fetched: rows lie anywhere in memory, and each would be waited for.
    template <class T>
    T* at_row(T* x, Int width, const Int* rows, Int i, Int count) const {
        if (!rows) return x + i * width;
        const Int next = rows[std::min(i + AHEAD, count - 1)];
        for (Int d = 0; d < width; d += 16) __builtin_prefetch(x + next * width + d);
        if (rows[i] < low || rows[i] >= high) throw std::out_of_range("a row of another group");
        return x + rows[i] * width;
    }

    // Copies rows of x to a matrix, each times its factor (null: each times `scale`), and fills the
    // matrix up to `all` rows with zeros.
    void pack(Matrix to, Int all, const float* x, Int width, const Int* rows, Int count,
              float scale = 1, const float* factor = nullptr) const {
        for (Int i = 0; i < count; i++) {
            const float* from = at_row(x, width, rows, i, count);
            const float times = factor ? factor[i] : scale;
            for (Int d = 0; d < width; d += LANES)
                store(to.at(i, d), load(from + d, width - d) * times);
        }
        std::fill(to.at(count), to.at(all), 0.f);
    }

    // Adds packed rows, times a factor, to the rows of x that they belong to.
    void unpack(Matrix from, float* x, Int width, const Int* rows, Int count,
                float factor = 1) const {
        for (Int i = 0; i < count; i++)
            add(at_row(x, width, rows, i, count), from.at(i), factor, width);
    }

    // Packs the keys and values that the query members first <= i < last read, and computes their
    // blocks. Starts and stops never fall, so those keys are all from the first start to the last
    // stop.
    void segment(Int first, Int last) {
        base = p.start[first];
        keys = p.stop[last - 1] - base;
        const Int all = keys + TALL;  // the last tile of keys may reach beyond the last key
        const Int* rows = p.key_row + base;
        if (base < 0 || keys < 0 || base + keys > p.M)
            throw std::out_of_range("a range beyond the key members");
        K = room(0, all, ldk);
        V = room(1, all, ldv);
        pack(K, all, p.k, p.D, rows, keys);
        pack(V, all, p.v, p.Dv, rows, keys);
        if (p.dout) {
            dK = room(2, all, ldk);
            dV = room(3, all, ldv);
            std::fill(dK.data, dK.at(all), 0.f);
            std::fill(dV.data, dV.at(all), 0.f);
        }
        for (Int i = first; i < last; i += BLOCK) block(i, std::min(BLOCK, last - i));
        if (p.dout) {
            unpack(dK, p.dk, p.D, rows, keys);
            unpack(dV, p.dv, p.Dv, rows, keys);
        }
    }

    // Computes `count` query members from `first` on; behind them the block is filled with queries
    // that read nothing.
    void block(Int first, Int count) {
        const Int* rows = p.query_row + first;
        const Int end = p.stop[first + count - 1] - base;
        begin = p.start[first] - base;
        for (Int i = 0; i < BLOCK; i++) {
            starts[i] = (std::int32_t)(i < count ? p.start[first + i] - base : end);
            stops[i] = (std::int32_t)(i < count ? p.stop[first + i] - base : end);
            const bool falls = i && (starts[i] < starts[i - 1] || stops[i] < stops[i - 1]);
            const bool leaves = starts[i] < 0 || starts[i] > stops[i] || stops[i] > keys;
            if (falls || leaves) throw std::out_of_range("a range that falls");
        }
        lows.resize(p.X * VECTORS);
        highs.resize(p.X * VECTORS);
        for (Int x = 0; x < p.X; x++)
            for (Int i = 0; i < count; i++) {
                const Int vector = x * VECTORS + i / LANES;
                lows[vector][i % LANES] = (std::int32_t)p.low[x * p.P + first + i];
                highs[vector][i % LANES] = (std::int32_t)p.high[x * p.P + first + i];
            }
        Q = room(4, BLOCK, ldk);
        QT = room(5, ldk, BLOCK);
        O = room(6, BLOCK, ldv);
        OT = room(7, ldv, BLOCK);
        S = room(8, end - begin + TALL, BLOCK);
        dP = room(9, p.dout ? end - begin + TALL : 0, BLOCK);
        pack(Q, BLOCK, p.q, p.D, rows, count, p.scale);
        transpose(p.D, Q, QT);
        if (!p.dout) return forward(first, count, end);
        const float* weight = p.weight ? p.weight + first : nullptr;
        pack(O, BLOCK, outputs(p.dout, first), p.Dv, output_rows(first), count, 1, weight);
        transpose(p.Dv, O, OT);
        backward(first, count, end);
    }

    // Outputs of the query members from `first` on, and their rows there: by row with weights and
    // where ranges are joined, else by member (null).
    bool by_row() const { return p.weight || p.delta || p.row_lse; }
    template <class T> T* outputs(T* x, Int first) const { return by_row() ? x : x + first * p.Dv; }
    const Int* output_rows(Int first) const { return by_row() ? p.query_row + first : nullptr; }

    // Calls f for each key j, key <= j < last, and each vector of queries, the v-th of the block.
    // The arguments of f are v, pointers to these queries' scores with j and to their dP, and which
    // of them read j.
    template <class F>
    void each(Int key, Int last, F f) const {
        IntVec start[VECTORS], stop[VECTORS], reads[VECTORS];
        std::memcpy(start, starts, sizeof start);
        std::memcpy(stop, stops, sizeof stop);
        for (; key < last; key++) {
            float *s = S.at(key - begin), *dp = dP.at(key - begin);
            const IntVec at = IntVec{} + (std::int32_t)key;
            UNROLL for (int v = 0; v < VECTORS; v++) reads[v] = (start[v] <= at) & (at < stop[v]);
            const Int m = std::min(base + key, p.M - 1);  // a tile may reach beyond the last member
            for (Int x = 0; x < p.X; x++) {
                const IntVec value = IntVec{} + (std::int32_t)p.value[x * p.M + m];
                UNROLL for (int v = 0; v < VECTORS; v++)
                    reads[v] &= (value < lows[x * VECTORS + v]) | (value >= highs[x * VECTORS + v]);
            }
            UNROLL for (int v = 0; v < VECTORS; v++) f(v, s + v * LANES, dp + v * LANES, reads[v]);
        }
    }

    // y[query, :] = sum over keys of scores[key, query] x[key, :], for TALL queries at a time, over
    // the keys that one of them reads. Scores of pairs that are not read must be zeros.
    void gather(Int width, Matrix scores, Matrix x, Matrix y) const {
        for (Int i = 0; i < BLOCK; i += TALL) {
            const Int start = starts[i], count = stops[i + TALL - 1] - start;
            product<true>(width, count, scores.from(start - begin, i), x.from(start), y.from(i));
        }
    }

    // The queries first_reader <= i < last_reader are all that read one of TALL keys from `key` on
    // (some between them may not).
    Int first_reader(Int key) const { return std::upper_bound(stops, stops + BLOCK, key) - stops; }
    Int last_reader(Int key) const {
        return std::lower_bound(starts, starts + BLOCK, key + TALL) - starts;
    }

    // scores[key, query] = x[key, :] . y[:, query] for TALL keys and the queries that read one of
    // them, which are rounded to whole COLUMNS. Other scores stay as they were.
    void score(Int key, Int width, Matrix x, Matrix y, Matrix scores) const {
        const Int from = first_reader(key) / COLUMNS * COLUMNS, columns = last_reader(key) - from;
        const Matrix to = scores.from(key - begin, from);
        product<false>(columns, width, x.from(key), y.from(0, from), to);
    }

    // y[key, :] += sum over queries of scores[key, query] x[query, :], for TALL keys, over the
    // queries that read one of them.
    void scatter(Int key, Int width, Matrix scores, Matrix x, Matrix y) const {
        const Int from = first_reader(key), count = last_reader(key) - from;
        const Matrix of_readers = scores.from(key - begin, from);
        product<false>(width, count, of_readers, x.from(from), y.from(key), true);
    }

    // Writes outputs and log-sums of a block: scores and their maximum, then weights and their sum,
    // then the outputs.
    void forward(Int first, Int count, Int end) {
        Vec most[VECTORS], total[VECTORS] = {};
        for (Vec& x : most) x = Vec{} - INFINITY;
        for (Int key = begin; key < end; key += TALL) {
            score(key, p.D, K, QT, S);
            each(key, key + TALL, [&](int v, float* s, float*, IntVec reads) {
                // Passes over NaN, which the sum below then is.
                most[v] = (reads & (load(s) > most[v])) ? load(s) : most[v];
            });
        }
        each(begin, end, [&](int v, float* s, float*, IntVec reads) {
            const Vec x = keep(reads, exponential(load(s) - most[v]));
            total[v] += x;
            store(s, x);
        });
        gather(ldv, S, V, O);
        for (Int i = 0; i < count; i++) {
            const float sum = total[i / LANES][i % LANES];
            // -inf where nothing is read.
            p.lse[first + i] = most[i / LANES][i % LANES] + std::log(sum);
            if (starts[i] == stops[i] || sum == 0) continue;  // sum is 0 where all keys are hidden
            float* out = at_row(outputs(p.out, first), p.Dv, output_rows(first), i, count);
            if (p.row_lse)
                join(out, O.at(i), sum, p.lse[first + i], p.row_lse[p.query_row[first + i]]);
            else
                add(out, O.at(i), (p.weight ? p.weight[first + i] : 1) / sum, p.Dv);
        }
    }

    // Joins what a query member reads to what its row has read so far: `out` and row_lse are then
    // the output and the log-sum of both. x is the member's output times `sum`, lse its log-sum.
    void join(float* out, const float* x, float sum, float lse, float& row_lse) const {
        if (lse == -INFINITY) return;
        const float most = std::max(row_lse, lse);
        const float total = most + std::log(std::exp(row_lse - most) + std::exp(lse - most));
        const float before = std::exp(row_lse - total), share = std::exp(lse - total) / sum;
        for (Int d = 0; d < p.Dv; d++) out[d] = out[d] * before + x[d] * share;
        row_lse = total;
    }

    // Adds the gradients of a block: first weights (in S), dP, delta and dv, then dS (in dP), dk
    // and dq.
    void backward(Int first, Int count, Int end) {
        Vec lse[VECTORS], delta[VECTORS] = {};
        for (int v = 0; v < VECTORS; v++)
            lse[v] = load(p.lse + first + v * LANES, count - v * LANES);
        for (Int key = begin; key < end; key += TALL) {
            score(key, p.D, K, QT, S);
            score(key, p.Dv, V, OT, dP);
            each(key, key + TALL, [&](int v, float* s, float* dp, IntVec reads) {
                const Vec x = keep(reads, exponential(load(s) - lse[v]));
                delta[v] += keep(reads, x * load(dp));
                store(s, x);
            });
            scatter(key, ldv, S, O, dV);
        }
        // From here on `delta` is delta - dlse.
        for (int v = 0; v < VECTORS; v++) {
            const Int from = first + v * LANES, some = count - v * LANES;
            delta[v] = p.delta ? load(p.delta + from, some) : delta[v] - load(p.dlse + from, some);
        }
        for (Int key = begin; key < end; key += TALL) {
            each(key, key + TALL, [&](int v, float* s, float* dp, IntVec reads) {
                store(dp, keep(reads, load(s) * (load(dp) - delta[v])));
            });
            scatter(key, ldk, dP, Q, dK);
        }
        gather(ldk, dP, K, Q);  // the queries are read no more: their matrix takes dq / scale
        unpack(Q, p.dq, p.D, p.query_row + first, count, p.scale);
    }

    // The forward or the backward pass of a row that reads by index; rows share too few keys to
    // pack them. Not inlined: compilers would not make vectors of `add`.
    __attribute__((noinline)) void index_row(Int row) {
        reads.assign(p.index + row * p.K, p.index + (row + 1) * p.K);
        reads.erase(std::remove(reads.begin(), reads.end(), -1), reads.end());
        const Int *index = reads.data(), count = reads.size();
        const float *q = p.q + row * p.D, *dout = p.dout ? p.dout + row * p.Dv : nullptr;
        float *s = room(0, 1, count + LANES).data, *dp = room(1, 1, count + LANES).data;
        for (Int j = 0; j < count; j++)
            s[j] = p.scale * dot(q, at_row(p.k, p.D, index, j, count), p.D);
        // Subtracted from logits: in the forward pass the largest of them, then the log-sum.
        float less = 0;
        if (p.dout)
            less = p.lse[row];
        else if (count)
            less = *std::max_element(s, s + count);
        for (Int j = 0; j < count; j += LANES) store(s + j, exponential(load(s + j) - less));
        if (!p.dout) {
            const float total = std::accumulate(s, s + count, 0.f);
            p.lse[row] = less + std::log(total);
            for (Int j = 0; j < count; j++)
                add(p.out + row * p.Dv, p.v + index[j] * p.Dv, s[j] / total, p.Dv);
            return;
        }
        for (Int j = 0; j < count; j++) dp[j] = dot(dout, p.v + index[j] * p.Dv, p.Dv);
        for (Int j = 0; j < count; j++) add(p.dv + index[j] * p.Dv, dout, s[j], p.Dv);
        const float delta = dot(s, dp, count) - p.dlse[row];
        for (Int j = 0; j < count; j++) s[j] *= p.scale * (dp[j] - delta);
        for (Int j = 0; j < count; j++) add(p.dq + row * p.D, p.k + index[j] * p.D, s[j], p.D);
        for (Int j = 0; j < count; j++) add(p.dk + index[j] * p.D, q, s[j], p.D);
    }
};

}  // namespace

extern "C" int rtx_attend(const Problem* p, int threads) {
    return in_threads<Attention>(*p, threads);
}
