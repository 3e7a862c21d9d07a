// Which positions belong to which cluster, float32, on a CPU: what `by_scores` of selection.py does, with the scores of
// a block of positions and a tile of centroids at a time, which stay in the nearest cache. A group is a head of a
// sequence; one thread takes it from its first position to its last: no result depends on the number of threads.

#include <cmath>
#include <functional>

#include "vectors.h"

// G groups in sequences of H heads. Without thresholds each cluster takes its W best; W is 0 where nobody asks for
// members. `nearest`, `score` and `square` may be null. `allocate` returns room for all members' rows, list after list.
struct Selection {
    const float *centroid, *x, *threshold;  // [H, C, D], [G, N, D], [H, C]
    const std::uint8_t* real;               // [G / H, N]; null: there is no padding
    Int *count, *nearest;                   // members [G, C]; the centroid that scores highest [G, N]
    double *score, *square;                 // sums [G, C] of the scores of all positions, and of their squares
    Int* (*allocate)(Int);
    Int G, H, C, N, D, W;
    std::vector<std::vector<Int>>* rows;  // members of each group
};

namespace {
constexpr Int PARTS = QUERIES / LANES;  // vectors of a block

typedef std::int8_t Bytes __attribute__((vector_size(LANES)));

// A member: its score, as an integer of the same order, above the position, of which the earlier counts as more.
using Member = std::uint64_t;

inline Member member(float score, Int position) {
    std::uint32_t bits;
    score += 0.f;  // -0 becomes 0
    std::memcpy(&bits, &score, 4);
    bits ^= bits >> 31 ? ~0u : 1u << 31;
    return (Member)bits << 32 | (std::uint32_t)~position;
}

inline Int position(Member m) { return (std::uint32_t)~m; }

inline float score(Member m) {
    std::uint32_t bits = m >> 32;
    bits ^= bits >> 31 ? 1u << 31 : ~0u;
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

inline double total(Vec x) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// The highest score so far of each lane and whose it is; of equals the first, and 0 beside NaN.
struct Highest {
    Vec score = Vec{} - INFINITY;
    IntVec whose{}, nan{};

    void offer(Vec s, Int c) {
        const IntVec higher = s > score;
        score = higher ? s : score, whose = higher ? IntVec{} + (std::int32_t)c : whose, nan |= s != s;
    }
    Int at(Int lane) const { return nan[lane] ? 0 : whose[lane]; }
};

struct Chooser {
    const Selection& p;
    const Int ld = vectors(p.D) * LANES, padded = (p.C + TALL - 1) / TALL * TALL;
    std::vector<Vec> space = std::vector<Vec>(((padded + QUERIES) * ld + (ld + TALL) * QUERIES) / LANES);
    const Matrix centroid{(float*)space.data(), ld}, X{centroid.at(padded), ld};
    const Matrix XT{X.at(QUERIES), QUERIES}, S{XT.at(ld), QUERIES};
    std::vector<std::vector<Member>> lists = std::vector<std::vector<Member>>(p.C);
    std::vector<Member> best;
    std::vector<float> bar = std::vector<float>(p.C);  // thresholds, or what a new member must exceed (NaN: nothing)

    void group(Int g) {
        for (Int c = 0, row = g % p.H * p.C; c < p.C; c++, row++) {
            std::memcpy(centroid.at(c), p.centroid + row * p.D, p.D * sizeof(float));
            bar[c] = p.threshold ? p.threshold[row] : NAN, lists[c].clear();
        }
        for (Int n = 0; n < p.N; n += QUERIES) block(g, n, std::min(QUERIES, p.N - n));
        for (Int c = 0; c < p.C; c++) {
            if (!p.threshold && (Int)lists[c].size() > p.W) cut(c);
            p.count[g * p.C + c] = lists[c].size();
            for (Member m : lists[c]) (*p.rows)[g].push_back(g * p.N + position(m));
        }
    }

    // Keeps the W best of a list, in their order.
    void cut(Int c) {
        best = lists[c];
        std::nth_element(best.begin(), best.begin() + p.W - 1, best.end(), std::greater<>());
        const Member last = best[p.W - 1];
        bar[c] = score(last);
        const auto end = std::remove_if(lists[c].begin(), lists[c].end(), [&](Member m) { return m < last; });
        lists[c].erase(end, lists[c].end());
    }

    void block(Int g, Int first, Int count) {
        IntVec real[PARTS] = {};
        for (Int i = 0; i < count; i++) {
            std::memcpy(X.at(i), p.x + (g * p.N + first + i) * p.D, p.D * sizeof(float));
            real[i / LANES][i % LANES] = !p.real || p.real[g / p.H * p.N + first + i] ? -1 : 0;
        }
        transpose(p.D, X, XT);
        Highest nearest[PARTS], above[PARTS];
        for (Int c = 0; c < p.C; c++) {
            if (c % TALL == 0) product<false, TALL>(PARTS, p.D, centroid.from(c), XT, S, false);
            Vec sum{}, squares{};
            for (Int v = 0; v < PARTS; v++) {
                const Vec s = load(S.at(c % TALL, v * LANES)), over = s - bar[c], known = keep(real[v], s);
                if (p.nearest) nearest[v].offer(s, c);
                if (p.threshold) above[v].offer(over, c);
                if (p.score) sum += known, squares += known * known;
                if (p.W) join(lists[c], s, real[v] & (p.threshold ? over >= 0 : ~(s <= bar[c])), first + v * LANES);
            }
            if (p.score) p.score[g * p.C + c] += total(sum), p.square[g * p.C + c] += total(squares);
            if (!p.threshold && p.W && (Int)lists[c].size() >= 2 * p.W) cut(c);
        }
        for (Int i = 0; i < count; i++) {
            const Int v = i / LANES, lane = i % LANES;
            if (p.nearest) p.nearest[g * p.N + first + i] = nearest[v].at(lane);
            if (p.threshold && real[v][lane] && !(above[v].score[lane] >= 0 && !above[v].nan[lane]))
                join_one(lists[above[v].at(lane)], first + i);
        }
    }

    // Adds the positions of some lanes from `first` on; a byte for each lane finds the few that join.
    void join(std::vector<Member>& list, Vec s, IntVec joins, Int first) const {
        const auto narrow = __builtin_convertvector(joins, Bytes);
        for (Int part = 0; part < LANES; part += 8) {
            std::uint64_t ones;
            std::memcpy(&ones, (const char*)&narrow + part, 8);
            for (ones &= 0x0101010101010101; ones; ones &= ones - 1) {
                const Int lane = part + __builtin_ctzll(ones) / 8;
                list.push_back(member(p.threshold || s[lane] != s[lane] ? -INFINITY : s[lane], first + lane));
            }
        }
    }

    // Adds a position of this block that no threshold let in, in its place.
    static void join_one(std::vector<Member>& list, Int position) {
        const Member m = member(-INFINITY, position);
        const auto at = std::lower_bound(list.begin(), list.end(), m, std::greater<>());
        if (at == list.end() || *at != m) list.insert(at, m);
    }
};
}  // namespace

extern "C" int rtx_select(Selection* p, int threads) {
    std::vector<std::vector<Int>> rows(p->G);
    p->rows = &rows;
    if (const int status = in_threads<Chooser>(*p, threads)) return status;
    Int total = 0;
    for (const auto& some : rows) total += some.size();
    Int* to = p->allocate(total);
    if (total && !to) return 2;
    for (const auto& some : rows) to = std::copy(some.begin(), some.end(), to);
    return 0;
}
