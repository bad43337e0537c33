// Chunked prefill. With G the inclusive prefix sum of g inside a chunk of up to 64 tokens and S the state entering it
// (WY form of the delta rule: Yang et al. 2024, arXiv:2406.06484, with the gates of arXiv:2412.06464):
//
//     A[i, j] = beta_i e^(G_i - G_j) k_i . k_j   for i > j, else 0
//     (I + A) D = beta (v - e^G S k)
//     O = e^G S q + tril(e^(G_i - G_j) q_i . k_j) D
//     S <- e^(G_last) S + sum_i e^(G_last - G_i) d_i k_i^T
//
// q and k enter products as they are given, their norms are applied to the results; so bf16 operands are exact. States
// stay fp32 in panels `[K, NR]`: columns of V are independent, and a task owns some panels of one key head.
#pragma once
#include "gates.h"
#include "products.h"

namespace gdn {

constexpr int64_t CHUNK = 64;

// What a task works on between tokens and states; K is padded to a multiple of 32, tokens likewise.
struct ChunkMemory {
    int64_t K;
    float *rows;        // [2 CHUNK, K] fp32: k, then q
    float *columns;     // [K, CHUNK] fp32: k transposed
    uint16_t *rows16;   // the same in bf16
    uint32_t *pairs;    // [K / 2, CHUNK] k transposed, in pairs
    uint16_t *columns16;  // [K, CHUNK]
    float *overlaps;    // [2 CHUNK, CHUNK] k . k, then q . k
    float *norm;        // [2 CHUNK] inverse norms of k, then of q
    float *beta, *since, *until;   // [CHUNK]; since: e^(G_i), until: e^(G_last - G_i)
    float *high, *low;             // [CHUNK] G as the sum of two floats
    float *system, *attention;     // [CHUNK, CHUNK]: -A, and the lower triangle of q . k with its factors
    uint16_t *attention16;         // [CHUNK, CHUNK]
    float *products;               // [2 CHUNK, NR] rows times the state
    float *updates;                // [CHUNK, NR] D
    uint32_t *update_pairs;        // [CHUNK / 2, NR]
    uint32_t *state_pairs;         // [K / 2, NR]

    static int64_t bytes(int64_t K) {
        return 2 * room<float>(2 * CHUNK * K) + room<float>(CHUNK * K) * 3 + room<float>(2 * CHUNK * CHUNK) * 3 +
               room<float>(2 * CHUNK) * 8 + room<float>(2 * CHUNK * NR) * 3 + room<float>(K * NR);
    }

    ChunkMemory(Scratch &scratch, int64_t padded) : K(padded) {
        rows = scratch.take<float>(2 * CHUNK * K);
        columns = scratch.take<float>(CHUNK * K);
        rows16 = scratch.take<uint16_t>(2 * CHUNK * K);
        pairs = scratch.take<uint32_t>(K / 2 * CHUNK);
        columns16 = scratch.take<uint16_t>(K * CHUNK);
        overlaps = scratch.take<float>(2 * CHUNK * CHUNK);
        norm = scratch.take<float>(2 * CHUNK);
        for (float **part : {&beta, &since, &until, &high, &low}) *part = scratch.take<float>(CHUNK);
        system = scratch.take<float>(CHUNK * CHUNK);
        attention = scratch.take<float>(CHUNK * CHUNK);
        attention16 = scratch.take<uint16_t>(CHUNK * CHUNK);
        products = scratch.take<float>(2 * CHUNK * NR);
        updates = scratch.take<float>(CHUNK * NR);
        update_pairs = scratch.take<uint32_t>(CHUNK / 2 * NR);
        state_pairs = scratch.take<uint32_t>(K / 2 * NR);
    }
};

// Some panels of the value heads of one key head of one sequence.
struct ExtendTask {
    int64_t sequence, key_head, first_unit, last_unit;  // unit: value head of the key head * panels + panel
};

struct ExtendShape {
    int64_t ratio, panels, units, parts, padded;
};

#if defined(__AVX512BF16__)
inline void load_rows16(
    const ExtendPlan &plan, const void *base, const View &view, int64_t token, int64_t head, int64_t tokens,
    int64_t padded_tokens, uint16_t *rows, int64_t pitch, float *norm) {
    int64_t K = plan.heads.K;
    for (int64_t i = 0; i < tokens; i++) {
        const uint16_t *source =
            (const uint16_t *)base + (token + i) * view.stride[0] + head * view.stride[1];
        uint16_t *row = rows + i * pitch;
        if (view.stride[2] == 1) {
            std::memcpy(row, source, K * 2);
        } else {
            for (int64_t k = 0; k < K; k++) row[k] = source[k * view.stride[2]];
        }
        std::memset(row + K, 0, (pitch - K) * 2);
        vf total{};
        for (int64_t k = 0; k < pitch; k += W) {
            vf x = load((const bf16 *)row + k);
            total += x * x;
        }
        norm[i] = 1.0f / std::sqrt(sum(total) + 1e-6f);
    }
    std::memset(rows + tokens * pitch, 0, (padded_tokens - tokens) * pitch * 2);
    std::fill(norm + tokens, norm + padded_tokens, 0.0f);
}
#endif

inline void load_rows(
    const ExtendPlan &plan, const void *base, const View &view, int64_t token, int64_t head, int64_t tokens,
    int64_t padded_tokens, float *rows, int64_t pitch, float *norm) {
    int64_t K = plan.heads.K;
    for (int64_t i = 0; i < tokens; i++) {
        float *row = rows + i * pitch;
        load_row(
            view.dtype, base, (token + i) * view.stride[0] + head * view.stride[1], view.stride[2], K, row);
        std::fill(row + K, row + pitch, 0.0f);
        norm[i] = inverse_norm(row, pitch);
    }
    std::memset(rows + tokens * pitch, 0, (padded_tokens - tokens) * pitch * 4);
    std::fill(norm + tokens, norm + padded_tokens, 0.0f);
}

// q and k of one key head, their norms and their products.
template <bool SHORT>
inline void open_chunk(
    const ExtendPlan &plan, const ExtendCall &call, int64_t token, int64_t key_head, int64_t tokens, int64_t padded,
    ChunkMemory &memory) {
    int64_t K = memory.K;
    if constexpr (SHORT) {
#if defined(__AVX512BF16__)
        load_rows16(plan, call.k, plan.k, token, key_head, tokens, padded, memory.rows16, K, memory.norm);
        load_rows16(
            plan, call.q, plan.q, token, key_head, tokens, padded, memory.rows16 + padded * K, K, memory.norm + padded);
        transpose_matrix((const float *)memory.rows16, K / 2, padded, K / 2, (float *)memory.pairs, CHUNK);
        for (int64_t p = 0; p < K / 2; p++)
            for (int64_t i = 0; i < padded; i += 16) {
                __m512i pair = _mm512_loadu_si512(memory.pairs + p * CHUNK + i);
                uint16_t *low = memory.columns16 + 2 * p * CHUNK + i, *high = low + CHUNK;
                _mm256_storeu_si256((__m256i *)low, _mm512_cvtepi32_epi16(pair));
                _mm256_storeu_si256((__m256i *)high, _mm512_cvtepi32_epi16(_mm512_srli_epi32(pair, 16)));
            }
        for (int64_t i = 0; i < padded; i += NR)
            multiply_bf16(
                memory.rows16, K, memory.pairs + i, CHUNK, K, memory.overlaps + i, CHUNK, false, 2 * padded);
#endif
    } else {
        load_rows(plan, call.k, plan.k, token, key_head, tokens, padded, memory.rows, K, memory.norm);
        load_rows(
            plan, call.q, plan.q, token, key_head, tokens, padded, memory.rows + padded * K, K, memory.norm + padded);
        transpose_matrix(memory.rows, K, padded, K, memory.columns, CHUNK);
        for (int64_t i = 0; i < padded; i += NR)
            multiply(memory.rows, K, 1, memory.columns + i, CHUNK, K, memory.overlaps + i, CHUNK, 0.0f, 2 * padded);
    }
}

// Decays of one value head, and the two triangles. Returns e^(G_last).
template <bool SHORT>
inline float open_head(
    const ExtendPlan &plan, const ExtendCall &call, int64_t token, int64_t head, int64_t tokens, int64_t padded,
    ChunkMemory &memory) {
    double total = 0, sums[CHUNK];
    for (int64_t i = 0; i < padded; i++) {
        float beta = 0.0f;
        if (i < tokens) {
            const float *g = (const float *)call.g, *b = (const float *)call.beta;
            total += std::max<double>(g[(token + i) * plan.g.stride[0] + head * plan.g.stride[1]], FORGOTTEN);
            beta = b[(token + i) * plan.beta.stride[0] + head * plan.beta.stride[1]];
        }
        sums[i] = total;
        memory.beta[i] = beta;
        memory.high[i] = (float)total;
        memory.low[i] = (float)(total - memory.high[i]);
    }
    vf last_high = broadcast(memory.high[padded - 1]), last_low = broadcast(memory.low[padded - 1]);
    for (int64_t i = 0; i < padded; i += W) {
        vf high = load(memory.high + i), low = load(memory.low + i);
        store(memory.since + i, exponential(high + low));
        store(memory.until + i, exponential(smaller((last_high - high) + (last_low - low), vf{})));
    }
    const float *keys = memory.norm, *queries = memory.norm + padded;
    float scale = (float)call.scale;
    for (int64_t i = 0; i < padded; i++) {
        float *system = memory.system + i * CHUNK, *attention = memory.attention + i * CHUNK;
        const float *with_key = memory.overlaps + i * CHUNK, *with_query = memory.overlaps + (padded + i) * CHUNK;
        float key_factor = -memory.beta[i] * keys[i], query_factor = scale * queries[i];
        int64_t j = 0;
        for (; j <= i; j += W) {
            vf difference = (memory.high[i] - load(memory.high + j)) + (memory.low[i] - load(memory.low + j));
            vf between = exponential(smaller(difference, vf{})) * load(keys + j);
            vi column;
            for (int lane = 0; lane < W; lane++) column[lane] = int32_t(j) + lane;
            store(system + j, select(column < int32_t(i), between * load(with_key + j) * key_factor, vf{}));
            store(attention + j, select(column <= int32_t(i), between * load(with_query + j) * query_factor, vf{}));
        }
        for (; j < padded; j += W) {
            store(system + j, vf{});
            store(attention + j, vf{});
        }
#if defined(__AVX512BF16__)
        if constexpr (SHORT)
            for (j = 0; j < padded; j += W)
                store((bf16 *)memory.attention16 + i * CHUNK + j, load(attention + j));
#endif
    }
    return (float)std::exp(sums[padded - 1]);
}

// (I + A) D = right-hand side, in place, MR rows at a time.
inline void solve(const float *system, float *updates, int64_t padded) {
    for (int64_t begin = 0; begin < padded; begin += MR) {
        if (begin)
            multiply_rows(
                system + begin * CHUNK, CHUNK, 1, updates, NR, begin, updates + begin * NR, NR, 1.0f);
        for (int64_t i = begin + 1; i < begin + MR; i++) {
            vf left = load(updates + i * NR), right = load(updates + i * NR + W);
            for (int64_t j = begin; j < i; j++) {
                float x = system[i * CHUNK + j];
                left += load(updates + j * NR) * x;
                right += load(updates + j * NR + W) * x;
            }
            store(updates + i * NR, left);
            store(updates + i * NR + W, right);
        }
    }
}

// One panel through one chunk.
template <bool SHORT>
inline void step_panel(
    const ExtendPlan &plan, const ExtendCall &call, int64_t token, int64_t head, int64_t first_value, int64_t tokens,
    int64_t padded, float decay, ChunkMemory &memory, float *panel) {
    const Heads &heads = plan.heads;
    int64_t K = memory.K, count = std::min<int64_t>(NR, heads.V - first_value);
    float *results = memory.products + padded * NR;
    if constexpr (SHORT) {
#if defined(__AVX512BF16__)
        for (int64_t p = 0; p < K; p += 2)
            for (int64_t n = 0; n < NR; n += W) {
                float *low = panel + p * NR + n, *high = low + NR;
                vf x = load(low), y = load(high);
                store_pairs(memory.state_pairs + p / 2 * NR + n, x, y);
                store(low, x * decay);
                store(high, y * decay);
            }
        multiply_bf16(memory.rows16, K, memory.state_pairs, NR, K, memory.products, NR, false, 2 * padded);
#endif
    } else {
        multiply(memory.rows, K, 1, panel, NR, K, memory.products, NR, 0.0f, 2 * padded);
    }

    const float *keys = memory.norm, *queries = memory.norm + padded;
    for (int64_t i = 0; i < padded; i++) {
        float *row = memory.updates + i * NR;
        if (i < tokens) {
            int64_t offset =
                (token + i) * plan.v.stride[0] + head * plan.v.stride[1] + first_value * plan.v.stride[2];
            load_row(plan.v.dtype, call.v, offset, plan.v.stride[2], count, row);
            std::fill(row + count, row + NR, 0.0f);
        } else {
            std::fill(row, row + NR, 0.0f);
        }
        float key_factor = -memory.since[i] * keys[i], query_factor = memory.since[i] * queries[i] * (float)call.scale;
        for (int64_t n = 0; n < NR; n += W) {
            vf error = load(row + n) + load(memory.products + i * NR + n) * key_factor;
            store(row + n, error * memory.beta[i]);
            store(results + i * NR + n, load(results + i * NR + n) * query_factor);
        }
    }
    solve(memory.system, memory.updates, padded);

    if constexpr (SHORT) {
#if defined(__AVX512BF16__)
        for (int64_t i = 0; i < padded; i += 2)
            for (int64_t n = 0; n < NR; n += W)
                store_pairs(
                    memory.update_pairs + i / 2 * NR + n, load(memory.updates + i * NR + n),
                    load(memory.updates + (i + 1) * NR + n));
        for (int64_t i = 0; i < padded; i += 32)
            multiply_bf16(
                memory.attention16 + i * CHUNK, CHUNK, memory.update_pairs, NR, i + 32, results + i * NR, NR, true, 32);
#endif
    } else {
        for (int64_t i = 0; i < padded; i += MR)
            multiply_rows(
                memory.attention + i * CHUNK, CHUNK, 1, memory.updates, NR, i + MR, results + i * NR, NR, 1.0f);
    }
    for (int64_t i = 0; i < tokens; i++) {
        int64_t offset = ((token + i) * heads.HV + head) * heads.V + first_value;
        store_row(plan.v.dtype, call.out, offset, 1, count, results + i * NR);
    }

    for (int64_t i = 0; i < padded; i++) {
        float factor = memory.until[i] * keys[i];
        for (int64_t n = 0; n < NR; n += W)
            store(memory.updates + i * NR + n, load(memory.updates + i * NR + n) * factor);
    }
    if constexpr (SHORT) {
#if defined(__AVX512BF16__)
        for (int64_t i = 0; i < padded; i += 2)
            for (int64_t n = 0; n < NR; n += W)
                store_pairs(
                    memory.update_pairs + i / 2 * NR + n, load(memory.updates + i * NR + n),
                    load(memory.updates + (i + 1) * NR + n));
        multiply_bf16(memory.columns16, CHUNK, memory.update_pairs, NR, padded, panel, NR, true, K);
#endif
    } else {
        multiply(memory.rows, 1, K, memory.updates, NR, padded, panel, NR, decay, K);
    }
}

template <bool SHORT, class T>
inline void run_task(
    const ExtendPlan &plan, const ExtendCall &call, const ExtendShape &shape, const ExtendTask &task,
    int64_t first_chunk) {
    const Heads &heads = plan.heads;
    int64_t slot = slot_at(plan.index, call.index, task.sequence, plan.slots);
    if (slot < 0) return;
    int64_t begin = index_at(plan.offsets, call.offsets, task.sequence);
    int64_t end = index_at(plan.offsets, call.offsets, task.sequence + 1);
    int64_t chunks = (end - begin + CHUNK - 1) / CHUNK, size = heads.V * heads.K;
    int64_t snapshot_chunk = -1, snapshot_slot = -1;
    if (plan.has_snapshots) {
        snapshot_chunk = index_at(plan.snapshot_chunk, call.snapshot_chunk, task.sequence);
        snapshot_slot = slot_at(plan.snapshot_slot, call.snapshot_slot, task.sequence, plan.slots);
    }
    if (chunks == 0 && (snapshot_chunk != 0 || snapshot_slot < 0)) return;

    int64_t units = task.last_unit - task.first_unit, panel_size = shape.padded * NR;
    Scratch &scratch = Scratch::of_thread();
    scratch.open(ChunkMemory::bytes(shape.padded) + room<float>(units * panel_size));
    ChunkMemory memory(scratch, shape.padded);
    float *panels = scratch.take<float>(units * panel_size);
    auto for_units = [&](auto &&body) {
        for (int64_t unit = task.first_unit; unit < task.last_unit; unit++) {
            int64_t head = task.key_head * shape.ratio + unit / shape.panels, first_value = unit % shape.panels * NR;
            body(head, first_value, panels + (unit - task.first_unit) * panel_size);
        }
    };
    auto save = [&](T *states) {
        for_units([&](int64_t head, int64_t first_value, float *panel) {
            int64_t count = std::min<int64_t>(NR, heads.V - first_value);
            store_panel(panel, heads.K, count, states + head * size + first_value * heads.K);
        });
    };

    T *pool = (T *)call.state, *own = pool + slot * plan.state.stride[0];
    T *snapshot = snapshot_slot < 0 ? nullptr : pool + snapshot_slot * plan.state.stride[0];
    T *chunk_states = (T *)call.chunk_states;
    for_units([&](int64_t head, int64_t first_value, float *panel) {
        int64_t count = std::min<int64_t>(NR, heads.V - first_value);
        load_panel(own + head * size + first_value * heads.K, heads.K, shape.padded, count, panel);
    });
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        if (chunk_states) save(chunk_states + (first_chunk + chunk) * heads.HV * size);
        if (snapshot && chunk == snapshot_chunk) save(snapshot);
        int64_t token = begin + chunk * CHUNK, tokens = std::min(CHUNK, end - token), padded = round_up(tokens, 32);
        open_chunk<SHORT>(plan, call, token, task.key_head, tokens, padded, memory);
        int64_t known = -1;
        float decay = 0;
        for_units([&](int64_t head, int64_t first_value, float *panel) {
            if (head != known) decay = open_head<SHORT>(plan, call, token, head, tokens, padded, memory);
            known = head;
            step_panel<SHORT>(plan, call, token, head, first_value, tokens, padded, decay, memory, panel);
        });
    }
    if (snapshot && chunks == snapshot_chunk) save(snapshot);
    if (chunks) save(own);
}

template <bool SHORT, class T>
inline void run_tasks(const ExtendPlan &plan, const ExtendCall &call, const ExtendShape &shape, int64_t threads) {
    int64_t tasks = plan.requests * plan.heads.HK * shape.parts;
    auto body = [&](int64_t at) {
        int64_t part = at % shape.parts, key_head = at / shape.parts % plan.heads.HK;
        int64_t sequence = at / shape.parts / plan.heads.HK, first_chunk = 0;
        if (call.chunk_states)
            for (int64_t i = 0; i < sequence; i++) {
                int64_t length = index_at(plan.offsets, call.offsets, i + 1) - index_at(plan.offsets, call.offsets, i);
                first_chunk += (length + CHUNK - 1) / CHUNK;
            }
        ExtendTask task{
            sequence, key_head, shape.units * part / shape.parts, shape.units * (part + 1) / shape.parts};
        run_task<SHORT, T>(plan, call, shape, task, first_chunk);
    };
    threads = omp_in_parallel() ? 1 : std::min(threads, tasks);
    if (threads <= 1) {
        FlushSubnormals flush;
        Tiles tiles;
        for (int64_t at = 0; at < tasks; at++) body(at);
        return;
    }
#pragma omp parallel num_threads(int(threads))
    {
        FlushSubnormals flush;
        Tiles tiles;
#pragma omp for schedule(dynamic, 1)
        for (int64_t at = 0; at < tasks; at++) body(at);
    }
}

inline int extend(const ExtendPlan &plan, const ExtendCall &call) {
    const Heads &heads = plan.heads;
    if (!offsets_ascend(plan.offsets, call.offsets, plan.requests, plan.tokens)) return BAD_OFFSETS;
    zero_other_rows(
        plan.offsets, call.offsets, plan.requests, plan.tokens, plan.v.dtype, call.out, heads.HV * heads.V,
        [&](int64_t i) { return slot_at(plan.index, call.index, i, plan.slots) >= 0; });
    ExtendShape shape;
    shape.ratio = heads.HV / heads.HK;
    shape.panels = (heads.V + NR - 1) / NR;
    shape.units = shape.ratio * shape.panels;
    shape.padded = round_up(heads.K, 32);
    int64_t threads = worth(call.threads, plan.tokens * heads.HV * heads.V * heads.K, 1 << 18);
    int64_t tasks = plan.requests * heads.HK;
    shape.parts = 1;
    while (tasks * shape.parts < 3 * threads && tasks * shape.parts % threads && shape.parts < shape.units)
        shape.parts++;
    with_type(plan.state.dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        // Sums of a few products don't average the rounding of states and updates, and gain nothing from bf16.
        if (BF16_PRODUCTS && plan.q.dtype == BF16 && heads.K >= 16)
            run_tasks<BF16_PRODUCTS, T>(plan, call, shape, threads);
        else
            run_tasks<false, T>(plan, call, shape, threads);
    });
    return DONE;
}

}  // namespace gdn
