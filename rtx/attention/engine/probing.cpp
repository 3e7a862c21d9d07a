// Which clusters of keys each query reads, float32, on a CPU: what `nearest_clusters`, `probes` and `best_candidates` of
// probed.py do, with the scores of a block of positions at a time, which stay in the nearest cache.

#include <cfloat>

#include "selection.cpp"

// G groups of N positions, in sequences of H heads. A key belongs to its nearest centroid. A query from `first` on probes
// clusters until these have M members among the positions that it may read. Without `index` the members of clusters that
// are probed come by `allocate`: rows, starts and stops, one array behind the other; else the W best keys go to `index`.
struct Probing {
    const float *centroid, *q, *k;     // [H, C, D], [G, N, D]; without q keys alone are assigned
    Int *key_row, *key_count;          // keys by cluster, in order of position [G, N], and how many each has [G, C]
    Int *query_count, *index;          // queries that probe each cluster [G, C]; rows that are read [G, N, W]
    Int* (*allocate)(Int);
    Int G, H, C, N, D, M, W, first, attend_self;
};

namespace {
constexpr float EQUAL = 64 * FLT_EPSILON;  // ties.py

struct Entry {
    std::int32_t cluster, position, start, stop;  // the last two count from the group's first key
};

struct Found : Probing {
    std::vector<std::vector<Entry>> entries;  // of each group, in order of position
};

// One thread's probing, group after group.
struct Prober : Rooms {
    Found& p;
    const Int ld = padded(p.D, COLUMNS), all = padded(p.C, COLUMNS);
    const Matrix centroids = room(0, ld, all), X = room(1, BLOCK, ld), S = room(2, BLOCK, all);
    Matrix keys{};                                                // LANES of them side by side, in order of clusters
    std::vector<float> half = std::vector<float>(all);            // of the squared norms
    std::vector<std::int32_t> count = std::vector<std::int32_t>(all);  // members that a query may read
    std::vector<Int> base = std::vector<Int>(p.C + 1);            // where clusters begin
    std::vector<std::int32_t> cluster = std::vector<std::int32_t>(p.N), member_position = cluster;
    std::vector<float> key_norm = std::vector<float>(p.N);        // by member
    std::vector<Entry> probed;                                    // by one query
    std::vector<float> score, sorted;                             // of its candidates
    std::vector<std::int32_t> candidate;                          // their members
    std::vector<std::pair<std::int32_t, std::int32_t>> chosen;    // positions and members
    float widest = 0;                                             // the largest norm of a centroid

    explicit Prober(Found& p) : p(p) {}

    void group(Int g) {
        load_centroids(g % p.H);
        for (Int n = 0; n < p.N; n += BLOCK) assign(g, n, std::min(BLOCK, p.N - n));
        pack_keys(g);
        if (!p.q) return;
        if (p.index) lay_out_keys(g);
        std::fill(count.begin(), count.end(), 0);
        Int seen = 0;
        for (Int n = p.first / BLOCK * BLOCK; n < p.N; n += BLOCK) {
            const Int some = std::min(BLOCK, p.N - n);
            multiply(p.q + (g * p.N + n) * p.D, some);
            for (Int i = 0; i < some; i++) {
                const Int readable = p.attend_self ? n + i + 1 : std::max<Int>(1, n + i);
                while (seen < readable) count[cluster[seen++]]++;
                if (n + i < p.first) continue;
                probe(i, n + i);
                if (p.index)
                    choose(g, i, n + i);
                else
                    p.entries[g].insert(p.entries[g].end(), probed.begin(), probed.end());
            }
        }
        std::fill_n(p.query_count + g * p.C, p.C, 0);
        for (const Entry& entry : p.entries[g]) p.query_count[g * p.C + entry.cluster]++;
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
        Int* counts = p.key_count + g * p.C;
        std::fill_n(counts, p.C, 0);
        for (Int n = 0; n < p.N; n++) counts[cluster[n]]++;
        base[0] = 0;
        for (Int c = 0; c < p.C; c++) base[c + 1] = base[c] + counts[c];
        std::vector<Int> next(base);
        for (Int n = 0; n < p.N; n++) member_position[next[cluster[n]]++] = (std::int32_t)n;
        for (Int m = 0; m < p.N; m++) p.key_row[g * p.N + m] = g * p.N + member_position[m];
    }

    void lay_out_keys(Int g) {
        const Int blocks = (p.N + LANES - 1) / LANES;
        keys = room(3, blocks * p.D, LANES);
        for (Int m = 0; m < p.N; m++) {
            const float* from = p.k + (g * p.N + member_position[m]) * p.D;
            for (Int d = 0; d < p.D; d++) *keys.at(m / LANES * p.D + d, m % LANES) = from[d];
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
            for (Int c = 0; c < p.C && members < p.M; c++) {
                if (s[c] < low) continue;
                const Int stop = base[c] + count[c], start = std::max(base[c], stop - p.M);
                probed.push_back({(std::int32_t)c, (std::int32_t)position, (std::int32_t)start, (std::int32_t)stop});
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
        score.clear(), candidate.clear(), chosen.clear();
        for (const Entry& entry : probed)
            for (Int block = entry.start / LANES; block * LANES < entry.stop; block++) {
                const Vec x = products(q, block);
                const Int from = std::max<Int>(entry.start, block * LANES);
                const Int to = std::min<Int>(entry.stop, (block + 1) * LANES);
                for (Int m = from; m < to; m++) {
                    const float one = x[m % LANES];
                    score.push_back(one == one ? one : INFINITY);
                    candidate.push_back((std::int32_t)m);
                }
            }
        float low = -INFINITY, high = -INFINITY;
        if ((Int)score.size() > p.W) {
            const float last = last_taken();
            const auto at = std::find(score.begin(), score.end(), last) - score.begin();
            const float margin = finite(EQUAL * std::sqrt(dot(q, q, p.D)) * key_norm[candidate[at]]);
            low = last - margin, high = last + margin;
        }
        Int* to = p.index + (g * p.N + position) * p.W;
        Int taken = 0;
        for (std::size_t j = 0; j < score.size(); j++) {
            const Int at = member_position[candidate[j]];
            if (score[j] > high) to[taken++] = g * p.N + at;
            else if (score[j] >= low) chosen.push_back({(std::int32_t)at, candidate[j]});
        }
        std::sort(chosen.begin(), chosen.end());
        for (std::size_t j = 0; taken < p.W && j < chosen.size(); j++) to[taken++] = g * p.N + chosen[j].first;
        std::fill(to + taken, to + p.W, -1);
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

    float last_taken() {
        sorted = score;
        std::nth_element(sorted.begin(), sorted.begin() + (p.W - 1), sorted.end(), std::greater<float>());
        return sorted[p.W - 1];
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
        std::vector<Int> next(p->C, begin);
        for (Int c = 1; c < p->C; c++) next[c] = next[c - 1] + p->query_count[g * p->C + c - 1];
        for (const Entry& entry : found.entries[g]) {
            const Int at = next[entry.cluster]++;
            rows[at] = g * p->N + entry.position;
            rows[total + at] = g * p->N + entry.start;
            rows[2 * total + at] = g * p->N + entry.stop;
        }
        begin += found.entries[g].size();
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
}
