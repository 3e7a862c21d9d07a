// Which positions belong to which cluster, float32, on a CPU: the same as `select_by_torch` of
// members.py, for finite scores.
//
// A score is the dot product of a centroid and a position's vector. Scores are computed for BLOCK
// positions at a time, so that they stay in the nearest cache, and go at once into a list of
// members for each cluster:
//     with thresholds      a position joins every cluster whose threshold its score reaches, and in
//                          any case the one whose threshold it exceeds most, or misses least;
//     without thresholds   a list takes every score that may yet be among the W best, and drops at
//                          times (`trim`) what no longer can be; in the end the W best stay
//                          (`choose`).
// Scores no further apart than a cluster's margin count as equal, and of equals the earlier
// position wins (ties.py).

#include "vectors.h"

// G groups (heads of all sequences) of N positions; H heads of a sequence, C clusters of a head, D
// the head size, W members of a cluster (0: members are not wanted).
struct Selection {
    const float *centroid, *x;  // [H, C, D], [G, N, D]
    const float* threshold;     // [H, C], or null
    const float* margin;        // [H, C]
    Int* count;                 // written: numbers of members [G, C]
    Int* nearest;    // written, or null: the centroid that scores a position highest [G, N]
    double* moment;  // written with thresholds: sums of scores [G, C], then those of squares
    Int* (*allocate)(Int);      // called once, with the number of all members: room for their rows
    Int G, H, C, N, D, W;
};

namespace {
typedef double WideVec __attribute__((vector_size(LANES * 8)));

// The members of a cluster, and without thresholds also those that may yet become members; in order
// of position.
struct Members {
    std::vector<std::uint32_t> key;  // scores as numbers that compare as scores do (`key_of`)
    std::vector<std::int32_t> position;
    std::size_t room = 0;  // at this length the list is trimmed
};

struct Task : Selection {
    std::vector<std::vector<Int>> rows;  // of the members of each group, cluster after cluster
};

// One thread's selection, group after group.
struct Chooser : Rooms {
    Task& p;
    const Int ld = padded(p.D, COLUMNS);  // floats from one vector to the next
    const Int all = padded(p.C, TALL);    // centroids, rounded up
    const Matrix centroid = room(0, all, ld);
    const Matrix X = room(1, BLOCK, ld), XT = room(2, ld, BLOCK);  // of the block; XT = X^T
    const Matrix S = room(3, all, BLOCK);                          // scores [centroid, position]
    std::vector<Members> lists = std::vector<Members>(p.C);
    std::vector<float> zeros = std::vector<float>(p.C);
    std::vector<float> threshold = zeros, margin = zeros;  // of the head
    // The least score that joins a list. Without thresholds NaN at first: all scores join.
    std::vector<float> bar = zeros;
    std::vector<WideVec> sums = std::vector<WideVec>(p.C), squares = sums;  // of scores

    explicit Chooser(Task& p) : p(p) {}

    void group(Int g) {
        for (Int c = 0; c < p.C; c++) {
            const Int row = g % p.H * p.C + c;
            std::copy_n(p.centroid + row * p.D, p.D, centroid.at(c));
            margin[c] = p.margin[row] >= 0 ? p.margin[row] : 0;  // it can be NaN
            threshold[c] = p.threshold ? p.threshold[row] : NAN;
            bar[c] = threshold[c] - margin[c];
            lists[c].key.clear();
            lists[c].position.clear();
            lists[c].room = 2 * p.W;
            sums[c] = squares[c] = WideVec{};
        }
        for (Int n = 0; n < p.N; n += BLOCK) block(g, n, std::min(BLOCK, p.N - n));
        for (Int c = 0; c < p.C; c++) {
            if (!p.threshold && (Int)lists[c].key.size() > p.W) choose(c);
            p.count[g * p.C + c] = lists[c].key.size();
            for (Int position : lists[c].position) p.rows[g].push_back(g * p.N + position);
            if (!p.threshold) continue;
            p.moment[g * p.C + c] = total(sums[c]);
            p.moment[(p.G + g) * p.C + c] = total(squares[c]);
        }
    }

    static double total(WideVec x) { return std::accumulate((double*)&x, (double*)&x + LANES, 0.); }

    // How many keys of a list are at least this one.
    static Int reach(const Members& list, std::uint32_t least) {
        std::uint32_t count = 0;
        for (std::uint32_t key : list.key) count += key >= least;
        return count;
    }

    // The W-th best score of a list: its key is the largest number that W keys reach, which is
    // built from the highest bit down.
    float last_of(const Members& list) const {
        std::uint32_t last = 0;
        for (std::uint32_t bit = 1u << 31; bit; bit >>= 1)
            if (reach(list, last | bit) >= p.W) last |= bit;
        return score_of(last);
    }

    // Drops all keys below `low`, and of those from `low` to `high`, which count as equal, all but
    // the first `equals`. The order stays. There are no branches: each entry is written, and
    // `length` moves on where it stays.
    static void keep_best(Members& list, std::uint32_t low, std::uint32_t high, Int equals) {
        Int length = 0;
        for (std::size_t i = 0; i < list.key.size(); i++) {
            const bool is_better = list.key[i] > high;
            const bool is_equal = list.key[i] >= low && !is_better;
            const bool keeps = is_better || (is_equal && equals > 0);
            list.key[length] = list.key[i];
            list.position[length] = list.position[i];
            length += keeps;
            equals -= is_equal;
        }
        list.key.resize(length);
        list.position.resize(length);
    }

    // Drops what can no longer be a member. The W-th best score never falls as positions come, so
    // what is below it by more than the margin is below it in the end.
    void trim(Int c) {
        bar[c] = last_of(lists[c]) - margin[c];
        keep_best(lists[c], key_of(bar[c]), ~0u, (Int)lists[c].key.size());
        lists[c].room = std::max<std::size_t>(2 * p.W, 2 * lists[c].key.size());
    }

    // Keeps the W best of a list: all that are better than the W-th best by more than the margin,
    // then the earliest of those that count as equal to it.
    void choose(Int c) {
        const float last = last_of(lists[c]);
        const std::uint32_t low = key_of(last - margin[c]), high = key_of(last + margin[c]);
        const Int better = high == ~0u ? 0 : reach(lists[c], high + 1);
        keep_best(lists[c], low, high, p.W - better);
    }

    // Takes in `count` positions of a group, from `first` on. `nearest` and `above` are the
    // clusters with the highest score, and with the highest score above its threshold, for each
    // position.
    void block(Int g, Int first, Int count) {
        const IntVec real = IntVec{} + (std::int32_t)count;
        IntVec lane, nearest[VECTORS], above[VECTORS];
        for (Int i = 0; i < count; i++)
            std::copy_n(p.x + (g * p.N + first + i) * p.D, p.D, X.at(i));
        for (int i = 0; i < LANES; i++) lane[i] = i;
        transpose(p.D, X, XT);
        for (Int c = 0; c < p.C; c += TALL)
            product<false>(BLOCK, p.D, centroid.from(c), XT, S.from(c));
        if (p.nearest) highest(zeros.data(), nearest);
        if (p.threshold) highest(threshold.data(), above);
        for (Int c = 0; c < p.C && p.W; c++) {
            for (std::int32_t v = 0; v < VECTORS; v++) {
                const Vec s = load(S.at(c, v * LANES));
                const IntVec inside = lane + v * (std::int32_t)LANES < real;
                IntVec joins = ~(s < bar[c]);
                if (p.threshold) {
                    joins = (s >= bar[c]) | (above[v] == (std::int32_t)c);
                    const WideVec wide = __builtin_convertvector(keep(inside, s), WideVec);
                    sums[c] += wide;
                    squares[c] += wide * wide;
                }
                join(lists[c], s, joins & inside, first + v * LANES);
            }
            if (!p.threshold && lists[c].key.size() >= lists[c].room) trim(c);
        }
        if (!p.nearest) return;
        for (Int i = 0; i < count; i++)
            p.nearest[g * p.N + first + i] = nearest[i / LANES][i % LANES];
    }

    // Writes for each position of the block the cluster where score - less[cluster] is highest; of
    // clusters that count as equal, the first.
    void highest(const float* less, IntVec* whose) const {
        for (Int v = 0; v < VECTORS; v++) {
            Vec most = Vec{} - INFINITY;
            whose[v] = IntVec{};
            for (Int c = 0; c < p.C; c++) {
                const Vec over = load(S.at(c, v * LANES)) - less[c];
                most = over > most ? over : most;
            }
            for (Int c = p.C; c-- > 0;) {
                const Vec over = load(S.at(c, v * LANES)) - less[c];
                whose[v] = over + margin[c] >= most ? IntVec{} + (std::int32_t)c : whose[v];
            }
        }
    }

    // Adds to a list the lanes at which `joins` is set, mostly none; lane l is position first + l.
    // NaN is worse than every score. `joins` is narrowed to one byte a lane, so that eight lanes
    // are one number, whose set bits are walked.
    static void join(Members& list, Vec s, IntVec joins, Int first) {
        const auto narrow = __builtin_convertvector(joins, Bytes);
        const BitVec bits = (BitVec)(s == s ? s + 0.f : Vec{} - INFINITY);  // -0 becomes 0
        const BitVec key = (IntVec)bits < 0 ? ~bits : bits | 1u << 31;
        for (Int part = 0; part < LANES; part += 8) {
            std::uint64_t ones;
            std::memcpy(&ones, (const char*)&narrow + part, 8);
            for (ones &= 0x0101010101010101; ones; ones &= ones - 1) {
                const Int lane = part + __builtin_ctzll(ones) / 8;
                list.key.push_back(key[lane]);
                list.position.push_back((std::int32_t)(first + lane));
            }
        }
    }
};
}  // namespace

// Writes the results of a selection; returns what `in_threads` does.
extern "C" int rtx_select(const Selection* p, int threads) try {
    Task task{*p, std::vector<std::vector<Int>>(p->G)};
    if (const int status = in_threads<Chooser>(task, threads)) return status;
    Int total = 0;
    for (const auto& some : task.rows) total += some.size();
    Int* to = p->allocate(total);
    if (total && !to) return 2;
    for (const auto& some : task.rows) to = std::copy(some.begin(), some.end(), to);
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
}
