// Which clusters of keys each query probes, and which keys of these it reads: float32, on a CPU.
// probed.py explains the method; this is what `clusters_by_distance` and `probed_clusters` of
// inverted_file.py and `best_candidates` of candidates.py do, in one pass over the positions of a
// head. Scores of BLOCK positions with all centroids are computed at a time, so that they stay in
// the nearest cache.

#include <cfloat>

#include "vectors.h"

// G groups (heads of all sequences) of N positions; H heads of a sequence, C clusters of a head, D
// the head size. There are three uses:
//     without q     the keys are sorted into clusters: key_row, key_count.
//     with index    each query reads the W best of the keys that it probes: index.
//     else          each query reads all keys that it probes, by lists. The first list of a head
//                   has the positions before `early`, each of which reads all up to itself. The
//                   others are its clusters: their keys (key_row, key_count), and the queries from
//                   `early` on that probe them (query_count, and what `allocate` gets).
struct Probing {
    const float *centroid, *q, *k;  // [H, C, D], [G, N, D], [G, N, D]
    Int *key_row, *key_count;       // written: rows of the key members; how many each list has
    Int* query_count;               // written for lists: how many query members each has
    Int* index;                     // written: rows that are read, -1 for none [G, N, W]
    // Returns room for three numbers of each of so many query members: their rows [P], the starts
    // of their ranges [P], and the stops [P].
    Int* (*allocate)(Int);
    Int G, H, C, N, D;
    Int M;                   // a query probes clusters until it has so many keys
    Int W, early, attend_self;
};

namespace {
constexpr float EQUAL = 64 * FLT_EPSILON;  // ties.py
constexpr int HALVINGS = 6;  // of the range of a query's scores, in the search for the last it needs

// A query in a list, and the range of the keys that it reads there. A range counts from the first
// key member of the group.
struct Entry {
    std::int32_t list, position, start, stop;
};

struct ProbingTask : Probing {
    std::vector<std::vector<Entry>> entries;  // of each group, in order of position
    const bool by_lists = q && !index;
    const Int front = by_lists ? 1 : 0;                // lists in front of a group's clusters
    const Int front_keys = by_lists ? early : 0;       // and their key members
    const Int lists = front + C, keys = front_keys + N;  // of a group
};

// The highest of the lanes, none of them NaN, in steps of halves, which compilers make vectors of.
inline float highest(Vec x) {
    float lanes[LANES];
    store(lanes, x);
    for (Int half = LANES / 2; half; half /= 2)
        UNROLL for (Int l = 0; l < half; l++) lanes[l] = std::max(lanes[l], lanes[l + half]);
    return lanes[0];
}

inline Int sum(IntVec x) {
    std::int32_t total = 0;
    for (int l = 0; l < LANES; l++) total += x[l];
    return total;
}

// One thread's probing, group after group.
struct Prober : Rooms {
    ProbingTask& p;
    const Int ld = padded(p.D, COLUMNS);   // floats from one vector to the next
    const Int all = padded(p.C, COLUMNS);  // centroids, rounded up
    const Matrix centroids = room(0, ld, all);               // [D, centroid]
    const Matrix X = room(1, BLOCK, ld);                     // the vectors of a block
    const Matrix S = room(2, BLOCK, all);                    // their scores [position, centroid]
    std::vector<float> half = std::vector<float>(all);       // of the centroids' squared norms
    float widest = 0;                                        // the largest norm of a centroid

    // The keys of a group in the order of clusters: place m holds the key of place_position[m], and
    // cluster c has the places base[c] to base[c + 1] - 1.
    std::vector<std::int32_t> cluster = std::vector<std::int32_t>(p.N);  // of each position
    std::vector<std::int32_t> place_position = cluster;
    std::vector<Int> base = std::vector<Int>(p.C + 1);

    // The state at one query.
    std::vector<std::int32_t> count = std::vector<std::int32_t>(all);  // keys that it may read
    std::vector<std::int32_t> gives = std::vector<std::int32_t>(all);  // as many, M at the most
    std::vector<Entry> probed;                                         // the clusters it probes

    // With an index: the keys side by side, LANES in a slot, so that one vector has the products of
    // a query with LANES keys. Cluster c begins at slot[c], a multiple of LANES.
    Matrix keys{};
    std::vector<Int> slot = std::vector<Int>(p.C + 1);
    std::vector<float> key_norm = std::vector<float>(p.N);  // by place
    // And the candidates of one query: at most 2 M - 1, and what a whole vector writes behind them.
    const Int most_candidates = p.index ? std::min(2 * p.M, p.N) + 2 * LANES : 0;
    Int candidates = 0;
    std::vector<float> score = std::vector<float>(most_candidates);
    std::vector<std::uint32_t> score_key = std::vector<std::uint32_t>(most_candidates);  // `key_of`
    std::vector<std::int32_t> candidate = std::vector<std::int32_t>(most_candidates);  // by place
    std::vector<std::int32_t> equal;  // positions whose scores count as equal to the last one taken

    explicit Prober(ProbingTask& p) : p(p) {}

    void group(Int g) {
        load_centroids(g % p.H);
        for (Int n = 0; n < p.N; n += BLOCK) assign(g, n, std::min(BLOCK, p.N - n));
        sort_keys(g);
        if (!p.q) return;
        if (p.index) lay_out_keys(g);
        for (Int n = 0; n < p.front_keys; n++)
            p.entries[g].push_back({0, (std::int32_t)n, 0, (std::int32_t)readable(n)});
        probe_all(g);
        if (!p.by_lists) return;
        Int* counts = p.query_count + g * p.lists;
        std::fill_n(counts, p.lists, 0);
        for (const Entry& entry : p.entries[g]) counts[entry.list]++;
    }

    // How many positions, from the first on, a query may read.
    Int readable(Int position) const {
        return p.attend_self ? position + 1 : std::max<Int>(1, position);
    }

    void load_centroids(Int head) {
        widest = 0;
        for (Int c = 0; c < p.C; c++) {
            const float* from = p.centroid + (head * p.C + c) * p.D;
            for (Int d = 0; d < p.D; d++) *centroids.at(d, c) = from[d];
            const float square = dot(from, from, p.D);
            half[c] = square / 2;
            widest = std::max(widest, std::sqrt(square));
        }
    }

    // Computes the scores of some vectors with all centroids.
    void multiply(const float* x, Int some) {
        for (Int i = 0; i < some; i++) std::copy_n(x + i * p.D, p.D, X.at(i));
        for (Int i = 0; i < some; i += TALL)
            product<false>(all, p.D, X.from(i), centroids, S.from(i));
    }

    // Finite scores, so that differences are numbers; NaN is worse than all others.
    static Vec sound(Vec x) {
        x = x == x ? x : Vec{} - FLT_MAX;
        x = x < FLT_MAX ? x : Vec{} + FLT_MAX;
        return x > -FLT_MAX ? x : Vec{} - FLT_MAX;
    }

    static float finite(float margin) { return std::isfinite(margin) ? margin : 0; }

    float most(const float* s) const {
        Vec best = Vec{} - INFINITY;
        for (Int c = 0; c < all; c += LANES) best = load(s + c) > best ? load(s + c) : best;
        return highest(best);
    }

    // Finds the cluster of each of some keys, from position n on: the first of those whose scores
    // are within the margin of the best.
    void assign(Int g, Int n, Int some) {
        multiply(p.k + (g * p.N + n) * p.D, some);
        for (Int i = 0; i < some; i++) {
            float* s = S.at(i);
            for (Int c = 0; c < all; c += LANES)
                store(s + c, sound(load(s + c) - load(&half[c])));
            std::fill(s + p.C, s + all, -INFINITY);
            const float norm = std::sqrt(dot(X.at(i), X.at(i), p.D));
            const float least = most(s) - finite(EQUAL * widest * (norm + widest));
            const auto is_nearest = [&](float x) { return x >= least; };
            cluster[n + i] = (std::int32_t)(std::find_if(s, s + p.C, is_nearest) - s);
        }
    }

    // Sorts the keys by cluster, and writes the key members: by counting, so that positions ascend.
    void sort_keys(Int g) {
        Int* front = p.key_count + g * p.lists;
        Int* counts = front + p.front;
        std::fill_n(front, p.lists, 0);
        if (p.front) front[0] = p.front_keys;
        for (Int n = 0; n < p.N; n++) counts[cluster[n]]++;
        base[0] = 0;
        for (Int c = 0; c < p.C; c++) base[c + 1] = base[c] + counts[c];
        std::vector<Int> next(base);
        for (Int n = 0; n < p.N; n++) {
            const Int place = next[cluster[n]]++;
            place_position[place] = (std::int32_t)n;
        }
        Int* rows = p.key_row + g * p.keys;
        for (Int n = 0; n < p.front_keys; n++) rows[n] = g * p.N + n;
        rows += p.front_keys;
        for (Int m = 0; m < p.N; m++) rows[m] = g * p.N + place_position[m];
    }

    void lay_out_keys(Int g) {
        slot[0] = 0;
        for (Int c = 0; c < p.C; c++) slot[c + 1] = slot[c] + padded(base[c + 1] - base[c], LANES);
        keys = room(3, slot[p.C] / LANES * p.D, LANES);
        for (Int c = 0; c < p.C; c++)
            for (Int m = base[c]; m < base[c + 1]; m++) {
                const Int at = slot[c] + m - base[c];
                const float* from = p.k + (g * p.N + place_position[m]) * p.D;
                for (Int d = 0; d < p.D; d++) *keys.at(at / LANES * p.D + d, at % LANES) = from[d];
                key_norm[m] = std::sqrt(dot(from, from, p.D));
            }
    }

    // Probes for each query behind the early ones. `count` follows the positions: at each query it
    // has the keys that this may read.
    void probe_all(Int g) {
        std::fill(count.begin(), count.end(), 0);
        Int seen = 0;
        for (Int first = p.front_keys / BLOCK * BLOCK; first < p.N; first += BLOCK) {
            const Int some = std::min(BLOCK, p.N - first);
            multiply(p.q + (g * p.N + first) * p.D, some);
            for (Int i = 0; i < some; i++) {
                const Int position = first + i;
                for (; seen < readable(position); seen++) count[cluster[seen]]++;
                if (position < p.front_keys) continue;
                probe(i, position);
                if (p.index)
                    choose(g, i, position);
                else
                    p.entries[g].insert(p.entries[g].end(), probed.begin(), probed.end());
            }
        }
    }

    // Finds the clusters that query i of the block probes: all whose scores are above that of the
    // last one that it needs for M keys, then, the first cluster first, of those equal to that one.
    void probe(Int i, Int position) {
        float* s = S.at(i);
        const float margin = finite(EQUAL * widest * std::sqrt(dot(X.at(i), X.at(i), p.D)));
        probed.clear();
        const Bounds bounds = prepare(s);
        if (bounds.keys < p.M) return take_all(s, bounds.low, position);
        const float last = last_needed(s, bounds);
        const float low = end_of_chain(s, last, margin), high = start_of_chain(s, last, margin);
        Int members = 0;
        for (Int c = 0; c < all; c += LANES) take(c, load(s + c) > high, position, members);
        for (Int c = 0; c < all && members < p.M; c += LANES)
            take(c, (load(s + c) >= low) & (load(s + c) <= high), position, members);
    }

    void take_all(const float* s, float low, Int position) {
        Int members = 0;
        for (Int c = 0; c < all; c += LANES) take(c, load(s + c) >= low, position, members);
    }

    // The range of a query's scores, and the keys that all clusters give.
    struct Bounds {
        float low, high;
        Int keys;
    };

    // Sets `gives`, and the scores of clusters without a key that the query may read to -inf.
    Bounds prepare(float* s) {
        Vec low = Vec{} + INFINITY, high = Vec{} - INFINITY;
        IntVec keys{};
        for (Int c = 0; c < all; c += LANES) {
            IntVec some;
            std::memcpy(&some, &count[c], sizeof some);
            const Vec x = sound(load(s + c));
            low = (some > 0) & (x < low) ? x : low;
            high = (some > 0) & (x > high) ? x : high;
            store(s + c, some > 0 ? x : Vec{} - INFINITY);
            const IntVec most = IntVec{} + (std::int32_t)p.M;
            some = some < most ? some : most;
            keys += some;
            std::memcpy(&gives[c], &some, sizeof some);
        }
        return {-highest(-low), highest(high), sum(keys)};
    }

    // How many keys the clusters give whose scores are at least x.
    Int keys_from(const float* s, float x) const {
        IntVec keys{};
        for (Int c = 0; c < all; c += LANES) {
            IntVec some;
            std::memcpy(&some, &gives[c], sizeof some);
            keys += (load(s + c) >= x) & some;
        }
        return sum(keys);
    }

    // The highest score such that the clusters with no lower one give M keys, of clusters that give
    // as many together. Halving the range of scores leaves few scores, which are then tried one by
    // one from above.
    float last_needed(const float* s, Bounds bounds) const {
        float low = bounds.low, high = bounds.high;
        if (keys_from(s, high) >= p.M) return high;
        for (int i = 0; i < HALVINGS; i++) {
            const float middle = low / 2 + high / 2;
            (keys_from(s, middle) < p.M ? high : low) = middle;
        }
        do high = highest_below(s, high);
        while (keys_from(s, high) < p.M);
        return high;
    }

    // The highest score below x.
    float highest_below(const float* s, float x) const {
        Vec best = Vec{} - INFINITY;
        for (Int c = 0; c < all; c += LANES) {
            const Vec y = load(s + c);
            best = (y < x) & (y > best) ? y : best;
        }
        return highest(best);
    }

    // The lowest score that steps no larger than the margin reach from x.
    float end_of_chain(const float* s, float x, float margin) const {
        while (true) {
            Vec least = Vec{} + x;
            for (Int c = 0; c < all; c += LANES) {
                const Vec y = load(s + c);
                least = (x - y <= margin) & (y < least) ? y : least;
            }
            const float next = -highest(-least);
            if (!(next < x)) return x;
            x = next;
        }
    }

    // The highest score that steps no larger than the margin reach from x.
    float start_of_chain(const float* s, float x, float margin) const {
        while (true) {
            Vec most = Vec{} + x;
            for (Int c = 0; c < all; c += LANES) {
                const Vec y = load(s + c);
                most = (y - x <= margin) & (y > most) ? y : most;
            }
            const float next = highest(most);
            if (!(next > x)) return x;
            x = next;
        }
    }

    // Probes the `wanted` ones of LANES clusters while members are fewer than M; `join` of
    // selection.cpp explains how their lanes are walked.
    void take(Int first, IntVec wanted, Int position, Int& members) {
        const auto narrow = __builtin_convertvector(wanted, Bytes);
        for (Int part = 0; part < LANES; part += 8) {
            std::uint64_t ones;
            std::memcpy(&ones, (const char*)&narrow + part, 8);
            for (ones &= 0x0101010101010101; ones && members < p.M; ones &= ones - 1) {
                const Int c = first + part + __builtin_ctzll(ones) / 8;
                const Int begin = p.front_keys + base[c], stop = begin + count[c];
                const Int start = std::max(begin, stop - p.M);
                probed.push_back({(std::int32_t)(p.front + c), (std::int32_t)position,
                                  (std::int32_t)start, (std::int32_t)stop});
                members += stop - start;
            }
        }
    }

    // Writes the rows of the W best keys that query i of the block has probed: all that are better
    // than the W-th best by more than the margin, then the earliest of those equal to it.
    void choose(Int g, Int i, Int position) {
        const float* q = X.at(i);
        candidates = 0;
        for (const Entry& entry : probed) add_candidates(q, entry);
        float low = -INFINITY, high = -INFINITY;
        if (candidates > p.W) {
            const float last = last_taken();
            const Int at = std::find(&score[0], &score[candidates], last) - &score[0];
            const float norms = std::sqrt(dot(q, q, p.D)) * key_norm[candidate[at]];
            const float margin = finite(EQUAL * norms);
            low = last - margin;
            high = last + margin;
        }
        Int* to = p.index + (g * p.N + position) * p.W;
        Int taken = 0;
        equal.clear();
        for (Int j = 0; j < candidates; j++) {
            if (score[j] > high)
                to[taken++] = g * p.N + place_position[candidate[j]];
            else if (score[j] >= low)
                equal.push_back(place_position[candidate[j]]);
        }
        std::sort(equal.begin(), equal.end());
        for (std::size_t j = 0; taken < p.W && j < equal.size(); j++)
            to[taken++] = g * p.N + equal[j];
        std::fill(to + taken, to + p.W, -1);
    }

    // Adds the keys of a range to the candidates, with their scores. A vector has the scores of one
    // slot, of which the range may begin in the middle: those before it are skipped. A whole vector
    // is stored, and the next one begins where the keys of this one end.
    void add_candidates(const float* q, const Entry& entry) {
        const Int c = entry.list, shift = slot[c] - base[c];
        IntVec lane;
        for (int l = 0; l < LANES; l++) lane[l] = l;
        for (Int m = entry.start; m < entry.stop;) {
            const Int skipped = (m + shift) % LANES;
            const Int some = std::min<Int>(LANES - skipped, entry.stop - m);
            const Vec x = products(q, (m + shift) / LANES);
            const Vec best = x == x ? x + 0.f : Vec{} + INFINITY;  // NaN is the best; -0 becomes 0
            const BitVec bits = (BitVec)best;
            const BitVec key = (IntVec)bits < 0 ? ~bits : bits | 1u << 31;  // `key_of`
            const IntVec place = lane + (std::int32_t)m;
            if (skipped) {
                const Int size = some * sizeof(float);
                std::memcpy(&score[candidates], (const float*)&best + skipped, size);
                std::memcpy(&score_key[candidates], (const float*)&key + skipped, size);
            } else {
                std::memcpy(&score[candidates], &best, sizeof best);
                std::memcpy(&score_key[candidates], &key, sizeof key);
            }
            std::memcpy(&candidate[candidates], &place, sizeof place);
            candidates += some;
            m += some;
        }
    }

    // The products of a query with the LANES keys of a slot.
    Vec products(const float* q, Int which) const {
        Vec sums[4] = {};
        const float* x = keys.at(which * p.D);
        Int d = 0;
        for (; d + 4 <= p.D; d += 4)
            UNROLL for (int j = 0; j < 4; j++) sums[j] += q[d + j] * load(x + (d + j) * LANES);
        for (; d < p.D; d++) sums[0] += q[d] * load(x + d * LANES);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    // The W-th best score; see `last_of` of selection.cpp.
    float last_taken() const {
        std::uint32_t last = 0;
        for (std::uint32_t bit = 1u << 31; bit; bit >>= 1) {
            const std::uint32_t least = last | bit;
            std::uint32_t reach = 0;
            for (Int j = 0; j < candidates; j++) reach += score_key[j] >= least;
            last = reach >= p.W ? least : last;
        }
        return score_of(last);
    }
};

// Writes the query members of a group, from member `first` on of `total`: the entries sorted by
// list, by counting, so that positions ascend within a list.
void write_members(const ProbingTask& p, Int g, Int first, Int total, Int* rows) {
    Int* starts = rows + total;
    Int* stops = starts + total;
    const Int* counts = p.query_count + g * p.lists;
    std::vector<Int> next(p.lists, first);
    for (Int l = 1; l < p.lists; l++) next[l] = next[l - 1] + counts[l - 1];
    for (const Entry& entry : p.entries[g]) {
        const Int at = next[entry.list]++;
        rows[at] = g * p.N + entry.position;
        starts[at] = g * p.keys + entry.start;
        stops[at] = g * p.keys + entry.stop;
    }
}
}  // namespace

// Writes the results of a probing; returns what `in_threads` does.
extern "C" int rtx_probe(const Probing* p, int threads) try {
    ProbingTask task{*p, std::vector<std::vector<Entry>>(p->G)};
    if (const int status = in_threads<Prober>(task, threads)) return status;
    if (!task.by_lists) return 0;
    Int total = 0;
    for (const auto& some : task.entries) total += some.size();
    Int* rows = p->allocate(total);
    if (total && !rows) return 2;
    Int first = 0;
    for (Int g = 0; g < p->G; g++) {
        write_members(task, g, first, total, rows);
        first += task.entries[g].size();
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
}
