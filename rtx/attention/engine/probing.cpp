// Which clusters of keys each query reads, float32, on a CPU: what `nearest_clusters`, `probes` and `best_candidates` of
// probed.py do, with the scores of a block of positions at a time, which stay in the nearest cache.

#include <cfloat>

#include "selection.cpp"

// G groups of N positions, in sequences of H heads. A key belongs to its nearest centroid. A query from `first` on probes
// clusters until these have M members among the positions that it may read. With `index` the W best of these keys go there.
// Without, lists come out: of the keys of each cluster, and of the queries that probe it. In front of a head's clusters
// there is then one list more, of the positions before `first`, which read all positions up to themselves. Queries come by
// `allocate`: rows, starts and stops, one array behind the other. A head has L lists and K keys in them.
struct Probing {
    const float *centroid, *q, *k;     // [H, C, D], [G, N, D]; without q keys alone are assigned
    Int *key_row, *key_count;          // keys by list, in order of position [G, K], and how many each has [G, L]
    Int *query_count, *index;          // queries of each list [G, L]; rows that are read [G, N, W]
    Int* (*allocate)(Int);
    Int G, H, C, N, D, M, W, first, attend_self;
};

namespace {
constexpr float EQUAL = 64 * FLT_EPSILON;  // ties.py

struct Entry {
    std::int32_t list, position, start, stop;  // the last two count from the group's first key
};

struct Found : Probing {
    std::vector<std::vector<Entry>> entries;             // of each group, in order of position
    const Int early = q && !index ? first : 0;           // members of the list in front
    const Int lists = C + (q && !index), keys = N + early;  // L and K
};

// One thread's probing, group after group.
struct Prober : Rooms {
    Found& p;
    const Int ld = padded(p.D, COLUMNS), all = padded(p.C, COLUMNS);
    const Matrix centroids = room(0, ld, all), X = room(1, BLOCK, ld), S = room(2, BLOCK, all);
    Matrix keys{};                                                // LANES of them side by side, in slots
    std::vector<Int> slot = std::vector<Int>(p.C + 1);            // where clusters begin in these, at multiples of LANES
    std::vector<float> half = std::vector<float>(all);            // of the squared norms
    std::vector<std::int32_t> count = std::vector<std::int32_t>(all);  // members that a query may read
    std::vector<Int> base = std::vector<Int>(p.C + 1);            // where clusters begin
    std::vector<std::int32_t> cluster = std::vector<std::int32_t>(p.N), member_position = cluster;
    std::vector<float> key_norm = std::vector<float>(p.N);        // by member
    std::vector<Entry> probed;                                    // by one query
    const Int room_of_candidates = p.index ? 2 * p.M + 2 * LANES : 0;
    std::vector<float> score = std::vector<float>(room_of_candidates);  // of its candidates
    std::vector<std::uint32_t> score_key = std::vector<std::uint32_t>(room_of_candidates);
    std::vector<std::int32_t> candidate = std::vector<std::int32_t>(room_of_candidates);  // their members
    Int candidates = 0;
    std::vector<std::int32_t> equal;                              // positions whose scores equal the last one taken
    float widest = 0;                                             // the largest norm of a centroid

    explicit Prober(Found& p) : p(p) {}

    void group(Int g) {
        load_centroids(g % p.H);
        for (Int n = 0; n < p.N; n += BLOCK) assign(g, n, std::min(BLOCK, p.N - n));
        pack_keys(g);
        if (!p.q) return;
        if (p.index) lay_out_keys(g);
        for (Int n = 0; n < p.early; n++)
            p.entries[g].push_back({0, (std::int32_t)n, 0, (std::int32_t)readable(n)});
        std::fill(count.begin(), count.end(), 0);
        Int seen = 0;
        for (Int n = p.first / BLOCK * BLOCK; n < p.N; n += BLOCK) {
            const Int some = std::min(BLOCK, p.N - n);
            multiply(p.q + (g * p.N + n) * p.D, some);
            for (Int i = 0; i < some; i++) {
                while (seen < readable(n + i)) count[cluster[seen++]]++;
                if (n + i < p.first) continue;
                probe(i, n + i);
                if (p.index)
                    choose(g, i, n + i);
                else
                    p.entries[g].insert(p.entries[g].end(), probed.begin(), probed.end());
            }
        }
        if (p.index) return;
        std::fill_n(p.query_count + g * p.lists, p.lists, 0);
        for (const Entry& entry : p.entries[g]) p.query_count[g * p.lists + entry.list]++;
    }

    // How many positions, from the first on, a query may read.
    Int readable(Int position) const { return p.attend_self ? position + 1 : std::max<Int>(1, position); }

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

    // Scores of some vectors by all centroids, a row for each vector.
    void multiply(const float* x, Int some) {
        for (Int i = 0; i < some; i++) std::copy_n(x + i * p.D, p.D, X.at(i));
        for (Int i = 0; i < some; i += TALL) product<false>(all, p.D, X.from(i), centroids, S.from(i));
    }

    // NaN is worse than every score, and infinite scores are finite, so that differences are numbers.
    static Vec sound(Vec x) {
        x = x == x ? x : Vec{} - FLT_MAX;
        x = x < FLT_MAX ? x : Vec{} + FLT_MAX;
        return x > -FLT_MAX ? x : Vec{} - FLT_MAX;
    }

    static float finite(float margin) { return std::isfinite(margin) ? margin : 0; }

    float most(const float* s) const {
        Vec best = Vec{} - INFINITY;
        for (Int c = 0; c < all; c += LANES) best = load(s + c) > best ? load(s + c) : best;
        return *std::max_element((float*)&best, (float*)&best + LANES);
    }

    void assign(Int g, Int n, Int some) {
        multiply(p.k + (g * p.N + n) * p.D, some);
        for (Int i = 0; i < some; i++) {
            float* s = S.at(i);
            for (Int c = 0; c < all; c += LANES) store(s + c, sound(load(s + c) - load(&half[c])));
            std::fill(s + p.C, s + all, -INFINITY);
            const float norm = std::sqrt(dot(X.at(i), X.at(i), p.D));
            const float least = most(s) - finite(EQUAL * widest * (norm + widest));
            cluster[n + i] = (std::int32_t)(std::find_if(s, s + p.C, [&](float x) { return x >= least; }) - s);
        }
    }

    void pack_keys(Int g) {
        Int *front = p.key_count + g * p.lists, *counts = front + (p.lists - p.C), *rows = p.key_row + g * p.keys;
        std::fill_n(front, p.lists, 0);
        if (p.lists > p.C) front[0] = p.early;
        for (Int n = 0; n < p.N; n++) counts[cluster[n]]++;
        base[0] = 0;
        for (Int c = 0; c < p.C; c++) base[c + 1] = base[c] + counts[c];
        std::vector<Int> next(base);
        for (Int n = 0; n < p.N; n++) member_position[next[cluster[n]]++] = (std::int32_t)n;
        for (Int n = 0; n < p.early; n++) *rows++ = g * p.N + n;
        for (Int m = 0; m < p.N; m++) *rows++ = g * p.N + member_position[m];
    }

    void lay_out_keys(Int g) {
        slot[0] = 0;
        for (Int c = 0; c < p.C; c++) slot[c + 1] = slot[c] + padded(base[c + 1] - base[c], LANES);
        keys = room(3, slot[p.C] / LANES * p.D, LANES);
        for (Int c = 0; c < p.C; c++)
            for (Int m = base[c]; m < base[c + 1]; m++) {
                const Int at = slot[c] + m - base[c];
                const float* from = p.k + (g * p.N + member_position[m]) * p.D;
                for (Int d = 0; d < p.D; d++) *keys.at(at / LANES * p.D + d, at % LANES) = from[d];
                key_norm[m] = std::sqrt(dot(from, from, p.D));
            }
    }

    // Finds which clusters a query probes. Scores that a chain of steps no larger than the margin links are equal.
    void probe(Int i, Int position) {
        float* s = S.at(i);
        const float margin = finite(EQUAL * widest * std::sqrt(dot(X.at(i), X.at(i), p.D)));
        for (Int c = 0; c < all; c += LANES) {
            IntVec some;
            std::memcpy(&some, &count[c], sizeof some);
            store(s + c, some > 0 ? sound(load(s + c)) : Vec{} - INFINITY);
        }
        probed.clear();
        Int members = 0;
        while (members < p.M) {
            float low = most(s);
            if (low == -INFINITY) return;
            for (float next = low; (next = lowest(s, low, margin)) < low;) low = next;
            for (Int c = 0; c < all && members < p.M; c += LANES) take(s, c, low, position, members);
        }
    }

    // Probes those of LANES clusters whose scores are no lower than `low`, while members are fewer than M.
    void take(float* s, Int first, float low, Int position, Int& members) {
        const auto narrow = __builtin_convertvector(load(s + first) >= low, Bytes);
        for (Int part = 0; part < LANES; part += 8) {
            std::uint64_t ones;
            std::memcpy(&ones, (const char*)&narrow + part, 8);
            for (ones &= 0x0101010101010101; ones && members < p.M; ones &= ones - 1) {
                const Int c = first + part + __builtin_ctzll(ones) / 8;
                const Int begin = p.early + base[c], stop = begin + count[c], start = std::max(begin, stop - p.M);
                const Int list = c + p.lists - p.C;
                probed.push_back({(std::int32_t)list, (std::int32_t)position, (std::int32_t)start, (std::int32_t)stop});
                members += stop - start;
                s[c] = -INFINITY;
            }
        }
    }

    // The lowest score that is no more than the margin below `low`.
    float lowest(const float* s, float low, float margin) const {
        Vec least = Vec{} + low;
        for (Int c = 0; c < all; c += LANES) {
            const Vec x = load(s + c);
            least = (low - x <= margin) & (x < least) ? x : least;
        }
        return *std::min_element((float*)&least, (float*)&least + LANES);
    }

    // Writes the W best of the members that a query has probed; of equals of the last of them the earlier.
    void choose(Int g, Int i, Int position) {
        const float* q = X.at(i);
        candidates = 0;
        for (const Entry& entry : probed) add_candidates(q, entry);
        float low = -INFINITY, high = -INFINITY;
        if (candidates > p.W) {
            const float last = last_taken();
            const Int at = std::find(&score[0], &score[candidates], last) - &score[0];
            const float margin = finite(EQUAL * std::sqrt(dot(q, q, p.D)) * key_norm[candidate[at]]);
            low = last - margin, high = last + margin;
        }
        Int* to = p.index + (g * p.N + position) * p.W;
        Int taken = 0;
        equal.clear();
        for (Int j = 0; j < candidates; j++) {
            if (score[j] > high)
                to[taken++] = g * p.N + member_position[candidate[j]];
            else if (score[j] >= low)
                equal.push_back(member_position[candidate[j]]);
        }
        std::sort(equal.begin(), equal.end());
        for (std::size_t j = 0; taken < p.W && j < equal.size(); j++) to[taken++] = g * p.N + equal[j];
        std::fill(to + taken, to + p.W, -1);
    }

    // Scores the members of a cluster that a query has probed. A whole vector is stored, and the next begins where the
    // members of this one end.
    void add_candidates(const float* q, const Entry& entry) {
        const Int c = entry.list, shift = slot[c] - base[c];
        IntVec lane;
        for (int l = 0; l < LANES; l++) lane[l] = l;
        for (Int m = entry.start; m < entry.stop;) {
            const Int skipped = (m + shift) % LANES, count = std::min<Int>(LANES - skipped, entry.stop - m);
            const Vec x = products(q, (m + shift) / LANES);
            const Vec best = x == x ? x + 0.f : Vec{} + INFINITY;  // NaN is the best, and there is no -0
            const BitVec bits = (BitVec)best, key = (IntVec)bits < 0 ? ~bits : bits | 1u << 31;
            const IntVec member = lane + (std::int32_t)m;
            if (skipped) {
                std::memcpy(&score[candidates], (const float*)&best + skipped, count * sizeof(float));
                std::memcpy(&score_key[candidates], (const float*)&key + skipped, count * sizeof(float));
            } else {
                std::memcpy(&score[candidates], &best, sizeof best);
                std::memcpy(&score_key[candidates], &key, sizeof key);
            }
            std::memcpy(&candidate[candidates], &member, sizeof member);
            candidates += count, m += count;
        }
    }

    Vec products(const float* q, Int block) const {
        Vec sums[4] = {};
        const float* x = keys.at(block * p.D);
        Int d = 0;
        for (; d + 4 <= p.D; d += 4)
            UNROLL for (int j = 0; j < 4; j++) sums[j] += q[d + j] * load(x + (d + j) * LANES);
        for (; d < p.D; d++) sums[0] += q[d] * load(x + d * LANES);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    // The W-th best score: the largest number that W keys reach, bit by bit.
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
}  // namespace

extern "C" int rtx_probe(const Probing* p, int threads) try {
    Found found{*p, std::vector<std::vector<Entry>>(p->G)};
    if (const int status = in_threads<Prober>(found, threads)) return status;
    if (!p->q || p->index) return 0;
    Int total = 0;
    for (const auto& some : found.entries) total += some.size();
    Int* rows = p->allocate(total);
    if (total && !rows) return 2;
    Int begin = 0;
    for (Int g = 0; g < p->G; g++) {
        std::vector<Int> next(found.lists, begin);
        for (Int l = 1; l < found.lists; l++) next[l] = next[l - 1] + p->query_count[g * found.lists + l - 1];
        for (const Entry& entry : found.entries[g]) {
            const Int at = next[entry.list]++;
            rows[at] = g * p->N + entry.position;
            rows[total + at] = g * found.keys + entry.start;
            rows[2 * total + at] = g * found.keys + entry.stop;
        }
        begin += found.entries[g].size();
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
}
