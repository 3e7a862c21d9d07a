// Which positions belong to which cluster, float32, on a CPU: what `by_scores` of selection.py does (of finite scores),
// with the scores of a block of positions at a time, which stay in the nearest cache.

#include "native.cpp"

// G groups of N positions, in sequences of H heads. A cluster takes what reaches its threshold, or without thresholds
// its W best; 0: nobody asks. `nearest` may be null, and `moment` without thresholds. `allocate` returns room for the
// members of all groups. Scores no further apart than a cluster's margin are equal (ties.py).
struct Selection {
    const float *centroid, *x, *threshold;  // [H, C, D], [G, N, D], [H, C]
    const float* margin;                    // [H, C]
    Int *count, *nearest;                   // members [G, C]; the centroid that scores highest [G, N]
    double* moment;                         // sums of scores [G, C], and of their squares behind them
    Int* (*allocate)(Int);
    Int G, H, C, N, D, W;
};

namespace {
typedef std::int8_t Bytes __attribute__((vector_size(LANES)));
typedef double WideVec __attribute__((vector_size(LANES * 8)));

// What may be a member of a cluster so far, by position. A key is a score's bits, changed so that keys compare as
// scores do.
struct Members {
    std::vector<std::uint32_t> key;
    std::vector<std::int32_t> position;
    std::size_t room = 0;  // how many there may be before those are dropped that are none
};

float score_of(std::uint32_t key) {
    const std::uint32_t bits = key >> 31 ? key ^ 1u << 31 : ~key;
    float score;
    std::memcpy(&score, &bits, sizeof score);
    return score;
}

std::uint32_t key_of(float score) {
    std::uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

struct Task : Selection {
    std::vector<std::vector<Int>> rows;  // members of each group
};

// One thread's selection, group after group.
struct Chooser : Rooms {
    Task& p;
    const Int ld = padded(p.D, COLUMNS), all = padded(p.C, TALL);
    const Matrix centroid = room(0, all, ld), X = room(1, BLOCK, ld), XT = room(2, ld, BLOCK), S = room(3, all, BLOCK);
    std::vector<Members> lists = std::vector<Members>(p.C);
    std::vector<float> nothing = std::vector<float>(p.C);
    std::vector<float> threshold = nothing, margin = nothing;  // of the head
    std::vector<float> bar = nothing;                          // what a new member must reach (NaN: nothing)
    std::vector<WideVec> sums = std::vector<WideVec>(p.C), squares = sums;  // of scores

    explicit Chooser(Task& p) : p(p) {}

    void group(Int g) {
        for (Int c = 0, row = g % p.H * p.C; c < p.C; c++, row++) {
            std::copy_n(p.centroid + row * p.D, p.D, centroid.at(c));
            margin[c] = p.margin[row] >= 0 ? p.margin[row] : 0;  // that of NaN is NaN
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

    // How many of a list have at least this key.
    static Int reach(const Members& list, std::uint32_t least) {
        std::uint32_t count = 0;
        for (std::uint32_t key : list.key) count += key >= least;
        return count;
    }

    // The W-th best score of a list.
    float last_of(const Members& list) const {
        std::uint32_t last = 0;  // the largest number that W keys reach, bit by bit
        for (std::uint32_t bit = 1u << 31; bit; bit >>= 1) last |= reach(list, last | bit) >= p.W ? bit : 0;
        return score_of(last);
    }

    // Keeps the first `equals` of the keys from `low` to `high`, and all above, in their order.
    static void keep_best(Members& list, std::uint32_t low, std::uint32_t high, Int equals) {
        Int kept = 0;
        for (std::size_t i = 0; i < list.key.size(); i++) {
            const bool is_better = list.key[i] > high;
            const bool is_equal = list.key[i] >= low && !is_better;
            const bool keeps = is_better || (is_equal && equals > 0);
            list.key[kept] = list.key[i];
            list.position[kept] = list.position[i];
            kept += keeps;
            equals -= is_equal;
        }
        list.key.resize(kept);
        list.position.resize(kept);
    }

    // Drops what can no longer be a member. The last of the W best only rises: what is below its equals stays so.
    void trim(Int c) {
        bar[c] = last_of(lists[c]) - margin[c];
        keep_best(lists[c], key_of(bar[c]), ~0u, (Int)lists[c].key.size());
        lists[c].room = std::max<std::size_t>(2 * p.W, 2 * lists[c].key.size());
    }

    // Keeps the W best of a list; of equals of the last of them the earlier.
    void choose(Int c) {
        const float last = last_of(lists[c]);
        const std::uint32_t low = key_of(last - margin[c]), high = key_of(last + margin[c]);
        keep_best(lists[c], low, high, p.W - (high == ~0u ? 0 : reach(lists[c], high + 1)));
    }

    void block(Int g, Int first, Int count) {
        const IntVec real = IntVec{} + (std::int32_t)count;
        IntVec lane, nearest[VECTORS], above[VECTORS];
        for (Int i = 0; i < count; i++) std::copy_n(p.x + (g * p.N + first + i) * p.D, p.D, X.at(i));
        for (int i = 0; i < LANES; i++) lane[i] = i;
        transpose(p.D, X, XT);
        for (Int c = 0; c < p.C; c += TALL) product<false>(BLOCK, p.D, centroid.from(c), XT, S.from(c));
        if (p.nearest) highest(nothing.data(), nearest);
        if (p.threshold) highest(threshold.data(), above);
        for (Int c = 0; c < p.C && p.W; c++) {
            for (std::int32_t v = 0; v < VECTORS; v++) {
                const Vec s = load(S.at(c, v * LANES));
                const IntVec inside = lane + v * (std::int32_t)LANES < real;
                const IntVec joins = p.threshold ? (s >= bar[c]) | (above[v] == (std::int32_t)c) : ~(s < bar[c]);
                if (p.threshold) {
                    const WideVec wide = __builtin_convertvector(keep(inside, s), WideVec);
                    sums[c] += wide;
                    squares[c] += wide * wide;
                }
                join(lists[c], s, joins & inside, first + v * LANES);
            }
            if (!p.threshold && lists[c].key.size() >= lists[c].room) trim(c);
        }
        for (Int i = 0; p.nearest && i < count; i++) p.nearest[g * p.N + first + i] = nearest[i / LANES][i % LANES];
    }

    // Which score of each position is the highest above its centroid's bar; of equals the first.
    void highest(const float* bars, IntVec* whose) const {
        for (Int v = 0; v < VECTORS; v++) {
            Vec most = Vec{} - INFINITY;
            whose[v] = IntVec{};
            for (Int c = 0; c < p.C; c++) {
                const Vec over = load(S.at(c, v * LANES)) - bars[c];
                most = over > most ? over : most;
            }
            for (Int c = p.C; c-- > 0;) {
                const Vec over = load(S.at(c, v * LANES)) - bars[c];
                whose[v] = over + margin[c] >= most ? IntVec{} + (std::int32_t)c : whose[v];
            }
        }
    }

    // Adds the positions of some lanes from `first` on, mostly none, to a list. NaN is worse than every score.
    static void join(Members& list, Vec s, IntVec joins, Int first) {
        const auto narrow = __builtin_convertvector(joins, Bytes);
        const BitVec bits = (BitVec)(s == s ? s + 0.f : Vec{} - INFINITY);  // no -0
        const BitVec key = (IntVec)bits < 0 ? ~bits : bits | 1u << 31;
        for (Int part = 0; part < LANES; part += 8) {
            std::uint64_t ones;
            std::memcpy(&ones, (const char*)&narrow + part, 8);
            for (ones &= 0x0101010101010101; ones; ones &= ones - 1) {
                const Int lane = part + __builtin_ctzll(ones) / 8;
                list.key.push_back(key[lane]), list.position.push_back((std::int32_t)(first + lane));
            }
        }
    }
};
}  // namespace

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
