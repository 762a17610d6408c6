// Two versions of llama_kv_cells: random operations on both have to give the same, and what each costs.
//
//   kv_cells check SEED N   N random operations; says the first difference, and exits with 1
//   kv_cells bench N        N repetitions; one line an operation: name, ns of the original, ns of the other
//
// Compiled with -DORIGINAL="<a.h>" -DOTHER="<b.h>"; what these headers include is included here before.

#include "llama.h"
#include "llama-cparams.h"

#include <algorithm>
#include <bitset>
#include <cassert>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace original {
#include ORIGINAL
}

namespace other {
#include OTHER
}

static constexpr llama_seq_id SEQS[] = { 0, 1, 2, LLAMA_MAX_SEQ - 1 };

//
// check
//

struct checker {
    original::llama_kv_cells a;
    other::llama_kv_cells    b;

    std::mt19937 random;
    std::string  trace;

    uint32_t n = 0;

    explicit checker(uint32_t seed) : random(seed) {}

    uint32_t below(uint32_t end) { return random() % end; }

    [[noreturn]] void fail(const char * what) {
        printf("%s differs after:%s\n", what, trace.c_str());
        exit(1);
    }

    void note(const char * op, int64_t x = 0, int64_t y = 0) {
        trace += std::string(" ") + op + "(" + std::to_string(x) + "," + std::to_string(y) + ")";
        if (trace.size() > 4000) {
            trace.erase(0, 2000);
        }
    }

    template <typename X, typename Y>
    void same(const char * what, const X & x, const Y & y) {
        if (!(x == y)) {
            fail(what);
        }
    }

    bool in_place(uint32_t i) { return !a.is_empty(i); }

    void compare() {
        same("size",        a.size(),          b.size());
        same("get_used",    a.get_used(),      b.get_used());
        same("used_min",    a.used_min(),      b.used_min());
        same("used_max_p1", a.used_max_p1(),   b.used_max_p1());
        same("has_shift",   a.get_has_shift(), b.get_has_shift());

        for (uint32_t i = 0; i < n; ++i) {
            same("is_empty",    a.is_empty(i),    b.is_empty(i));
            same("seq_get_all", a.seq_get_all(i), b.seq_get_all(i));
            same("pos_in",      a.pos_in(i, 3, 40), b.pos_in(i, 3, 40));
            if (!a.is_empty(i)) {
                same("pos_get",   a.pos_get(i),     b.pos_get(i));
                same("get_shift", a.get_shift(i),   b.get_shift(i));
                same("ext_get",   a.ext_get(i).tok, b.ext_get(i).tok);
                same("seq_count", a.seq_count(i),   b.seq_count(i));
            }
        }

        for (const llama_seq_id s : SEQS) {
            same("seq_pos_min", a.seq_pos_min(s), b.seq_pos_min(s));
            same("seq_pos_max", a.seq_pos_max(s), b.seq_pos_max(s));

            const auto & x = a.seq_pos_get(s);
            const auto & y = b.seq_pos_get(s);

            same("seq_pos_get().size()",  x.size(),  y.size());
            same("seq_pos_get().empty()", x.empty(), y.empty());

            if (!std::equal(x.begin(), x.end(), y.begin(), y.end())) {
                fail("seq_pos_get()");
            }

            const llama_pos p = below(60);
            const uint32_t  i = below(n);

            same("seq_pos_tok_le", a.seq_pos_tok_le(s, p), b.seq_pos_tok_le(s, p));

            auto u = x.upper_bound({ p, i });
            auto v = y.upper_bound({ p, i });
            for (; u != x.end() && v != y.end(); ++u, ++v) {
                same("upper_bound", *u, *v);
                same("upper_bound", u->first, v->first);
            }
            same("upper_bound", u == x.end(), v == y.end());
        }
    }

    void place(uint32_t i, llama_pos p, llama_seq_id s) {
        note("place", i, p);
        original::llama_kv_cell_ext ext_a;
        other::llama_kv_cell_ext    ext_b;
        ext_a.tok = ext_b.tok = below(1000);

        a.pos_set(i, p); a.ext_set(i, ext_a); a.seq_add(i, s);
        b.pos_set(i, p); b.ext_set(i, ext_b); b.seq_add(i, s);
    }

    // some cells, as a ubatch takes them, and perhaps back
    void place_and_restore() {
        std::vector<uint32_t> idxs;
        for (uint32_t k = 0; k < 1 + below(8); ++k) {
            const uint32_t i = below(n);
            if (std::find(idxs.begin(), idxs.end(), i) == idxs.end()) {
                idxs.push_back(i);
            }
        }
        a.reset_shift();
        b.reset_shift();

        const auto saved_a = a.cp(idxs);
        const auto saved_b = b.cp(idxs);

        for (const uint32_t i : idxs) {
            if (in_place(i)) {
                note("rm", i);
                a.rm(i);
                b.rm(i);
            }
            place(i, below(60), SEQS[below(4)]);
        }
        compare();

        note("set", idxs.size());
        a.set(idxs, saved_a);
        b.set(idxs, saved_b);

        const uint32_t from = below(n);
        const uint32_t size = below(n - from) + 1;
        const uint32_t to   = below(n - size + 1);
        note("cp", from, to);
        const auto range_a = a.cp(from, size);
        const auto range_b = b.cp(from, size);
        a.set(to, range_a);
        b.set(to, range_b);
    }

    void step() {
        const uint32_t     i = below(n);
        const llama_seq_id s = SEQS[below(4)];

        switch (below(12)) {
            case 0: case 1: case 2: // a sequence goes on in the next cells
                {
                    llama_pos p = a.seq_pos_max(s) + 1;
                    for (uint32_t k = i; k < std::min(n, i + 1 + below(12)); ++k) {
                        if (!in_place(k)) {
                            place(k, p++, s);
                        }
                    }
                } break;
            case 3: // anywhere
                if (!in_place(i)) {
                    place(i, below(60), s);
                } break;
            case 4:
                if (in_place(i)) {
                    note("rm", i);
                    a.rm(i);
                    b.rm(i);
                } break;
            case 5: // llama_kv_cache::seq_rm()
                {
                    const llama_pos p0 = below(60);
                    const llama_pos p1 = p0 + below(60);
                    note("seq_rm", p0, p1);
                    for (uint32_t k = 0; k < n; ++k) {
                        if (a.pos_in(k, p0, p1) && a.seq_has(k, s)) {
                            const bool x = a.seq_rm(k, s);
                            const bool y = b.seq_rm(k, s);
                            same("seq_rm", x, y);
                        }
                    }
                } break;
            case 6: // seq_cp(), also onto cells that the sequence has
                {
                    const llama_seq_id dst = SEQS[below(4)];
                    note("seq_cp", s, dst);
                    for (uint32_t k = 0; k < n; ++k) {
                        if (in_place(k) && a.seq_has(k, s) && !a.seq_has(k, dst)) {
                            a.seq_add(k, dst);
                            b.seq_add(k, dst);
                        }
                    }
                } break;
            case 7:
                if (below(4) == 0) {
                    note("seq_keep", s);
                    for (uint32_t k = 0; k < n; ++k) {
                        if (!in_place(k) || a.seq_get_all(k).any()) {
                            const bool x = a.seq_keep(k, s);
                            const bool y = b.seq_keep(k, s);
                            same("seq_keep", x, y);
                        }
                    }
                } break;
            case 8: // a context shift
                {
                    const llama_pos p0 = below(60);
                    const llama_pos d  = (llama_pos) below(40) - 20;
                    note("pos_add", p0, d);
                    for (uint32_t k = 0; k < n; ++k) {
                        if (a.pos_in(k, p0, 60) && a.seq_has(k, s)) {
                            const bool x = a.pos_add(k, d);
                            const bool y = b.pos_add(k, d);
                            same("pos_add", x, y);
                        }
                    }
                } break;
            case 9:
                note("pos_div");
                for (uint32_t k = 0; k < n; ++k) {
                    if (in_place(k) && a.seq_has(k, s)) {
                        a.pos_div(k, 2);
                        b.pos_div(k, 2);
                    }
                }
                break;
            case 10:
                place_and_restore();
                break;
            case 11:
                if (below(20) == 0) {
                    note("reset");
                    a.reset();
                    b.reset();
                } break;
        }
    }

    void run(uint32_t n_steps) {
        while (n_steps > 0) {
            n = 1 + below(200);
            trace.clear();
            note("resize", n);
            a.resize(n);
            b.resize(n);
            for (uint32_t k = 0; k < 200 && n_steps > 0; ++k, --n_steps) {
                step();
                compare();
            }
        }
    }
};

//
// bench
//

static constexpr uint32_t N_CELLS  = 20480;
static constexpr uint32_t N_TOKENS = 12722;

template <typename F>
static double time_ns(F && fn) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

// keeps the compiler from leaving out what is computed
static volatile uint64_t sink;

template <typename CELLS>
static void decode(CELLS & cells, uint32_t n_seq, uint32_t n_tokens) {
    for (uint32_t i = 0; i < n_tokens; ++i) {
        const llama_seq_id s = i % n_seq;
        cells.pos_set(i, cells.seq_pos_max(s) + 1);
        cells.seq_add(i, s);
        sink = cells.used_max_p1() + cells.get_used();
    }
}

// as llama_kv_cache::seq_rm() and others do
template <typename CELLS, typename F>
static void for_seq(CELLS & cells, llama_seq_id s, llama_pos p0, llama_pos p1, F && fn) {
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.pos_in(i, p0, p1) && cells.seq_has(i, s)) {
            fn(i);
        }
    }
}

template <typename CELLS>
static std::vector<std::pair<std::string, double>> costs() {
    constexpr llama_pos END = std::numeric_limits<llama_pos>::max();

    std::vector<std::pair<std::string, double>> res;

    for (const uint32_t n_seq : { 1u, 4u }) {
        const std::string of = n_seq == 1 ? "" : " of 4 sequences";

        CELLS cells;
        cells.resize(N_CELLS);

        const uint32_t n = N_TOKENS/n_seq;
        const auto add = [&](const char * name, double ns, double count) { res.emplace_back(name + of, ns/count); };

        add("decode a token", time_ns([&] { decode(cells, n_seq, N_TOKENS); }), N_TOKENS);
        add("search for a slot", time_ns([&] {
            uint64_t n_free = 0;
            for (uint32_t i = 0; i < N_CELLS; ++i) {
                n_free += cells.is_empty(i) || (cells.seq_count(i) == 1 && cells.seq_pos_max(cells.seq_get(i)) < 0);
            }
            sink = n_free + cells.get_used();
        }), N_CELLS);
        add("copy a sequence, a token", time_ns([&] { for_seq(cells, 0, 0, END, [&](uint32_t i) { cells.seq_add(i, 9); }); }), n);
        add("remove the copy, a token", time_ns([&] { for_seq(cells, 9, 0, END, [&](uint32_t i) { cells.seq_rm(i, 9); }); }), n);
        add("remove the last 100", time_ns([&] { for_seq(cells, 0, n - 100, END, [&](uint32_t i) { cells.seq_rm(i, 0); }); }), 100);
        add("remove every other token", time_ns([&] {
            for_seq(cells, 0, 0, n/2, [&](uint32_t i) {
                if (cells.pos_get(i) % 2 == 0) {
                    cells.seq_rm(i, 0);
                }
            });
        }), n/4);
        add("shift half, a token", time_ns([&] { for_seq(cells, 0, n/2, END, [&](uint32_t i) { cells.pos_add(i, -5); }); }), n/2);
        add("remove a sequence, a token", time_ns([&] { for_seq(cells, 0, 0, END, [&](uint32_t i) { cells.seq_rm(i, 0); }); }), 3*n/4);
    }

    {
        constexpr uint32_t N_WINDOW = 1024;

        CELLS cells;
        cells.resize(N_WINDOW);
        decode(cells, 1, N_WINDOW);

        res.emplace_back("decode a token of a window", time_ns([&] {
            for (uint32_t i = 0; i < N_TOKENS; ++i) {
                const uint32_t cell = i % N_WINDOW;
                cells.rm(cell);
                cells.pos_set(cell, N_WINDOW + i);
                cells.seq_add(cell, 0);
                sink = cells.seq_pos_min(0) + cells.seq_pos_max(0);
            }
        })/N_TOKENS);
    }

    return res;
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size()/2];
}

static void bench(uint32_t n) {
    std::vector<std::string>         names;
    std::vector<std::vector<double>> all[2];

    for (uint32_t i = 0; i < n; ++i) {
        for (int version = 0; version < 2; ++version) {
            const auto found = version == 0 ? costs<original::llama_kv_cells>() : costs<other::llama_kv_cells>();
            all[version].resize(found.size());
            names.resize(found.size());
            for (size_t k = 0; k < found.size(); ++k) {
                names[k] = found[k].first;
                all[version][k].push_back(found[k].second);
            }
        }
    }

    for (size_t k = 0; k < names.size(); ++k) {
        printf("%s\t%.2f\t%.2f\n", names[k].c_str(), median(all[0][k]), median(all[1][k]));
    }
}

int main(int argc, char ** argv) {
    if (argc == 4 && strcmp(argv[1], "check") == 0) {
        checker(strtoul(argv[2], nullptr, 10)).run(strtoul(argv[3], nullptr, 10));
        puts("no difference");
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "bench") == 0) {
        bench(strtoul(argv[2], nullptr, 10));
        return 0;
    }
    fprintf(stderr, "usage: %s check SEED N | bench N\n", argv[0]);
    return 2;
}
