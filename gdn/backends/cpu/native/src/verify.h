// Draft tokens of each request, a chain or a tree, from the state of its slot, which is only read. With G_i the sum of
// the log decays on the path to draft i, both included, and j running over the ancestors of i:
//
//     d_i = beta_i (v_i - e^(G_i) S k_i - sum_j e^(G_i - G_j) (k_i . k_j) d_j)
//     o_i = e^(G_i) S q_i + sum_(j or i) e^(G_i - G_j) (q_i . k_j) d_j
//
// so all products with S come from one read, and the states after each draft are only formed where they are stored.
#pragma once
#include "decode.h"

namespace gdn {

constexpr int VECTORS = 8;  // that one read of a state is multiplied with

// The drafts of one request and key head.
struct Drafts {
    int64_t count, pitch, padded;  // padded: 2 count rounded up to VECTORS
    float *units;                  // [padded, pitch]: k of every draft, then q
    float *overlaps;               // [2, count, count]: k_i . k_j, then q_i . k_j
};

inline int64_t parent_of(const VerifyPlan &plan, const VerifyCall &call, int64_t request, int64_t draft) {
    if (!plan.has_parents) return draft - 1;
    if (draft == 0) return -1;
    int64_t parent = draft < plan.parent_columns ? index_at(plan.parents, call.parents, request, draft) : 0;
    return parent >= 0 && parent < draft ? parent : 0;
}

inline void load_drafts(
    const VerifyPlan &plan, const VerifyCall &call, int64_t first_token, int64_t key_head, Drafts &drafts) {
    const Heads &heads = plan.heads;
    int64_t n = drafts.count, pitch = drafts.pitch;
    for (int64_t i = 0; i < n; i++) {
        load_unit(plan.k, call.k, first_token + i, key_head, heads.K, pitch, 1.0f, drafts.units + i * pitch);
        load_unit(
            plan.q, call.q, first_token + i, key_head, heads.K, pitch, (float)call.scale,
            drafts.units + (n + i) * pitch);
    }
    std::fill(drafts.units + 2 * n * pitch, drafts.units + drafts.padded * pitch, 0.0f);
    for (int64_t i = 0; i < 2 * n; i++)
        for (int64_t j = 0; j <= i % n; j++)
            drafts.overlaps[i * n + j] = dot(drafts.units + i * pitch, drafts.units + j * pitch, pitch);
}

// products[x][rows] for all padded vectors.
template <class T>
inline void all_products(const T *state, int64_t rows, int64_t K, const Drafts &drafts, int64_t V, float *products) {
    for (int64_t r = 0; r < rows; r += 2) {
        const T *pair = state + r * K;
        for (int64_t x = 0; x < drafts.padded; x += VECTORS) {
            const float *vectors = drafts.units + x * drafts.pitch;
            float sums[16];
            if (r + 1 < rows) {
                dots<2, VECTORS>(pair, K, vectors, drafts.pitch, sums);
                for (int i = 0; i < VECTORS; i++) std::memcpy(products + (x + i) * V + r, sums + 2 * i, 8);
            } else {
                row_dots(pair, K, vectors, drafts.pitch, VECTORS, sums);
                for (int i = 0; i < VECTORS; i++) products[(x + i) * V + r] = sums[i];
            }
        }
    }
}

// target += factor * source
inline void add_scaled(float *target, const float *source, float factor, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(target + i, load(target + i) + load(source + i) * factor);
    for (; i < n; i++) target[i] += source[i] * factor;
}

// Stores the state after every draft: rows of `state` stepped along the tree, one row at a time.
template <class T, class B>
inline void store_states(
    const T *state, B *target, int64_t step_stride, int64_t rows, int64_t K, const Drafts &drafts,
    const int64_t *parents, const float *alpha, const float *d, int64_t V, float *nodes) {
    int64_t full = K / W * W, tail = K - full, pitch = drafts.pitch;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < drafts.count; i++) {
            const float *key = drafts.units + i * pitch, *before = parents[i] < 0 ? nullptr : nodes + parents[i] * pitch;
            float *node = nodes + i * pitch, weight = d[i * V + r];
            B *row = target + i * step_stride + r * K;
            for (int64_t p = 0; p < full; p += W) {
                vf s = before ? load(before + p) : load(state + r * K + p);
                s = s * alpha[i] + load(key + p) * weight;
                store(node + p, s);
                store(row + p, s);
            }
            if (tail) {
                vf s = before ? load(before + full) : load_part(state + r * K + full, tail);
                s = s * alpha[i] + load(key + full) * weight;
                store(node + full, s);
                store_part(row + full, s, tail);
            }
        }
    }
}

template <class T>
inline void verify_share(const VerifyPlan &plan, const VerifyCall &call, int64_t parts, int64_t first, int64_t last) {
    const Heads &heads = plan.heads;
    int64_t pitch = round_up(heads.K, W), steps = plan.steps, ratio = heads.HV / heads.HK, V = heads.V;
    int64_t most = round_up(2 * steps, VECTORS), size = V * heads.K;
    Scratch &scratch = Scratch::of_thread();
    scratch.open(
        room<float>(most * pitch) + room<float>(2 * steps * steps) + room<float>(most * V) + room<float>(2 * steps * V) +
        room<int64_t>(steps) + 3 * room<float>(steps) + room<double>(steps) + room<float>(steps * pitch));
    Drafts drafts{0, pitch, 0, scratch.take<float>(most * pitch), scratch.take<float>(2 * steps * steps)};
    float *products = scratch.take<float>(most * V), *d = scratch.take<float>(2 * steps * V), *out = d + steps * V;
    int64_t *parents = scratch.take<int64_t>(steps);
    float *alpha = scratch.take<float>(steps), *beta = scratch.take<float>(steps), *g = scratch.take<float>(steps);
    double *total = scratch.take<double>(steps);
    float *nodes = scratch.take<float>(steps * pitch);
    int64_t known = -1;
    for (int64_t at = first; at < last; at++) {
        int64_t part = at % parts, head = at / parts % heads.HV, request = at / parts / heads.HV;
        int64_t begin = part_begin(part, parts, V), rows = part_begin(part + 1, parts, V) - begin;
        int64_t slot = slot_at(plan.index, call.index, request, plan.slots);
        int64_t token = index_at(plan.offsets, call.offsets, request);
        int64_t count = index_at(plan.offsets, call.offsets, request + 1) - token;
        if (slot < 0 || count == 0) continue;
        if (known != request * heads.HK + head / ratio) {
            known = request * heads.HK + head / ratio;
            drafts.count = count;
            drafts.padded = round_up(2 * count, VECTORS);
            load_drafts(plan, call, token, head / ratio, drafts);
            for (int64_t i = 0; i < count; i++) parents[i] = parent_of(plan, call, request, i);
        }
        for (int64_t i = 0; i < count; i++) {
            HeadGates gates = head_gates(plan, call, token + i, head);
            g[i] = gates.log_decay, alpha[i] = gates.alpha, beta[i] = gates.beta;
            total[i] = std::max<double>(g[i], FORGOTTEN) + (parents[i] < 0 ? 0.0 : total[parents[i]]);
        }
        const T *state = (const T *)call.state + slot * plan.state.stride[0] + head * size + begin * heads.K;
        all_products(state, rows, heads.K, drafts, V, products);
        for (int64_t i = 0; i < count; i++) {
            float *update = d + i * V, *result = out + i * V, since = (float)std::exp(total[i]);
            const float *with_key = products + i * V, *with_query = products + (count + i) * V;
            int64_t offset = (token + i) * plan.v.stride[0] + head * plan.v.stride[1] + begin * plan.v.stride[2];
            load_row(plan.v.dtype, call.v, offset, plan.v.stride[2], rows, update);
            for (int64_t r = 0; r < rows; r++) {
                update[r] -= since * with_key[r];
                result[r] = since * with_query[r];
            }
            for (int64_t j = parents[i]; j >= 0; j = parents[j]) {
                float between = (float)std::exp(total[i] - total[j]);
                add_scaled(update, d + j * V, -between * drafts.overlaps[i * count + j], rows);
                add_scaled(result, d + j * V, between * drafts.overlaps[(count + i) * count + j], rows);
            }
            for (int64_t r = 0; r < rows; r++) update[r] *= beta[i];
            add_scaled(result, update, drafts.overlaps[(count + i) * count + i], rows);
            store_row(plan.v.dtype, call.out, ((token + i) * heads.HV + head) * V + begin, 1, rows, result);
        }
        if (!plan.has_buffer) continue;
        int64_t row = slot_at(plan.buffer_row, call.buffer_row, request, plan.rows);
        if (row < 0) continue;
        with_type(plan.buffer.dtype, [&](auto *type) {
            auto *target = (decltype(type))call.buffer + row * plan.buffer.stride[0] + head * size + begin * heads.K;
            store_states(
                state, target, plan.buffer.stride[1], rows, heads.K, drafts, parents, alpha, d, V, nodes);
        });
    }
}

inline int verify(const VerifyPlan &plan, const VerifyCall &call) {
    const Heads &heads = plan.heads;
    if (!offsets_ascend(plan.offsets, call.offsets, plan.requests, plan.tokens)) return BAD_OFFSETS;
    for (int64_t i = 0; i < plan.requests; i++) {
        int64_t length = index_at(plan.offsets, call.offsets, i + 1) - index_at(plan.offsets, call.offsets, i);
        if (length > plan.steps) return BAD_OFFSETS;
    }
    zero_other_rows(
        plan.offsets, call.offsets, plan.requests, plan.tokens, plan.v.dtype, call.out, heads.HV * heads.V,
        [&](int64_t i) { return slot_at(plan.index, call.index, i, plan.slots) >= 0; });
    int64_t states = plan.requests * heads.HV;
    int64_t threads = worth(call.threads, states * heads.V * heads.K, 1 << 14);
    int64_t parts = parts_of(states, threads, heads.V);
    with_type(plan.state.dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel(threads, states * parts, [&](int64_t first, int64_t last) {
            verify_share<T>(plan, call, parts, first, last);
        });
    });
    return DONE;
}

}  // namespace gdn
