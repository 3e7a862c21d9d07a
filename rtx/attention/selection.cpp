// Which positions belong to which cluster, float32, on a CPU: what `by_scores` of selection.py does (of finite scores),
// with the scores of a block of positions at a time, which stay in the nearest cache.

#include "native.cpp"

// G groups of N positions, in sequences of H heads. A cluster takes what reaches its threshold, or without thresholds
// its W best; 0: nobody asks. `nearest` may be null, and `moment` without thresholds. `allocate` returns room for the
// members of all groups.
struct Selection {
    const float *centroid, *x, *threshold;  // [H, C, D], [G, N, D], [H, C]
    Int *count, *nearest;                   // members [G, C]; the centroid that scores highest [G, N]
    double* moment;                         // sums of scores [G, C], and of their squares behind them
    Int* (*allocate)(Int);
    Int G, H, C, N, D, W;
};

namespace {
typedef std::int8_t Bytes __attribute__((vector_size(LANES)));

// The members of a cluster so far, by position. A key is a score's bits, changed so that keys compare as scores do.
struct Members {
    std::vector<std::uint32_t> key;
    std::vector<std::int32_t> position;
};

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
    std::vector<float> bar = nothing;  // thresholds, or what a new member must exceed (NaN: nothing)
    std::vector<Vec> sums = std::vector<Vec>(p.C), squares = sums;  // of scores

    explicit Chooser(Task& p) : p(p) {}

    void group(Int g) {
        for (Int c = 0, row = g % p.H * p.C; c < p.C; c++, row++) {
            std::copy_n(p.centroid + row * p.D, p.D, centroid.at(c));
            bar[c] = p.threshold ? p.threshold[row] : NAN, lists[c].key.clear(), lists[c].position.clear();
            sums[c] = squares[c] = Vec{};
        }
        for (Int n = 0; n < p.N; n += BLOCK) block(g, n, std::min(BLOCK, p.N - n));
        for (Int c = 0; c < p.C; c++) {
            if (!p.threshold && (Int)lists[c].key.size() > p.W) cut(c);
            p.count[g * p.C + c] = lists[c].key.size();
            for (Int position : lists[c].position) p.rows[g].push_back(g * p.N + position);
            if (!p.threshold) continue;
            p.moment[g * p.C + c] = total(sums[c]), p.moment[(p.G + g) * p.C + c] = total(squares[c]);
        }
    }

    static double total(Vec x) { return std::accumulate((float*)&x, (float*)&x + LANES, 0.); }

    // Keeps the W best of a list, in their order; of equals the earlier.
    void cut(Int c) {
        auto& [key, position] = lists[c];
        const auto reach = [&key = key](std::uint32_t least) {
            std::uint32_t count = 0;
            for (std::uint32_t k : key) count += k >= least;
            return (Int)count;
        };
        std::uint32_t last = 0;  // the largest number that W keys reach, bit by bit
        for (std::uint32_t bit = 1u << 31; bit; bit >>= 1) last |= reach(last | bit) >= p.W ? bit : 0;
        Int kept = 0, equals = p.W - reach(last + 1);
        for (std::size_t i = 0; i < key.size(); i++) {
            const bool is_equal = key[i] == last, keeps = key[i] > last || (is_equal && equals > 0);
            key[kept] = key[i], position[kept] = position[i], kept += keeps, equals -= is_equal;
        }
        key.resize(kept), position.resize(kept);
        const std::uint32_t bits = last >> 31 ? last ^ 1u << 31 : ~last;  // as `join` changed them
        std::memcpy(&bar[c], &bits, sizeof bits);
    }

    void block(Int g, Int first, Int count) {
        const IntVec real = IntVec{} + (std::int32_t)count;
        IntVec lane, nearest[VECTORS], above[VECTORS];
        for (Int i = 0; i < count; i++) std::copy_n(p.x + (g * p.N + first + i) * p.D, p.D, X.at(i));
        for (int i = 0; i < LANES; i++) lane[i] = i;
        transpose(p.D, X, XT);
        for (Int c = 0; c < p.C; c += TALL) product<false>(BLOCK, p.D, centroid.from(c), XT, S.from(c));
        if (p.nearest) highest(nothing.data(), nearest);
        if (p.threshold) highest(bar.data(), above);
        for (Int c = 0; c < p.C && p.W; c++) {
            for (std::int32_t v = 0; v < VECTORS; v++) {
                const Vec s = load(S.at(c, v * LANES));
                const IntVec inside = lane + v * (std::int32_t)LANES < real;
                const IntVec joins = p.threshold ? (s >= bar[c]) | (above[v] == (std::int32_t)c) : ~(s <= bar[c]);
                if (p.threshold) sums[c] += keep(inside, s), squares[c] += keep(inside, s * s);
                join(lists[c], s, joins & inside, first + v * LANES);
            }
            if (!p.threshold && (Int)lists[c].key.size() >= 2 * p.W) cut(c);
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
                const IntVec higher = over > most;
                most = higher ? over : most, whose[v] = higher ? IntVec{} + (std::int32_t)c : whose[v];
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
