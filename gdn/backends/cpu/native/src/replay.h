// Decode over a checkpoint and a ring of m updates since (ReplaySSM). With G_j the inclusive prefix sum of their log
// decays and G the whole sum, the live state is S = e^G S0 + sum_j e^(G - G_j) d_j k_j^T.
#pragma once
#include "decode.h"

namespace gdn {

// The valid entries of the ring of one value head, fp32.
struct Ring {
    int64_t length;
    float *keys;     // [length, pitch]
    float *updates;  // [length, V]
    float *decay;    // [length] e^(G - G_j)
    float *overlap;  // [2, length] k_j . k and k_j . q
    float total;     // e^G
};

inline int64_t ring_floats(const DecodePlan &plan, int64_t pitch) {
    return plan.window * (pitch + plan.heads.V + 3);
}

inline Ring load_ring(
    const DecodePlan &plan, const DecodeCall &call, int64_t slot, int64_t head, int64_t length, int64_t pitch,
    const float *unit, float *memory) {
    const Heads &heads = plan.heads;
    int64_t L = plan.window, key_head = head / (heads.HV / heads.HK);
    Ring ring{length, memory, memory + L * pitch, nullptr, nullptr, 1.0f};
    ring.decay = ring.updates + L * heads.V;
    ring.overlap = ring.decay + L;
    const float *g = (const float *)call.ring_g + slot * plan.ring_g.stride[0] + head * L;
    int64_t d_at = slot * plan.ring_d.stride[0] + head * L * heads.V;
    int64_t k_at = slot * plan.ring_k.stride[0] + key_head * L * heads.K;
    double total = 0;
    for (int64_t j = 0; j < length; j++) total += std::max<double>(g[j], FORGOTTEN);
    ring.total = (float)std::exp(total);
    double prefix = 0;
    for (int64_t j = 0; j < length; j++) {
        prefix += std::max<double>(g[j], FORGOTTEN);
        ring.decay[j] = (float)std::exp(total - prefix);
        float *key = ring.keys + j * pitch;
        load_row(plan.ring_k.dtype, call.ring_k, k_at + j * heads.K, 1, heads.K, key);
        std::fill(key + heads.K, key + pitch, 0.0f);
        ring.overlap[j] = dot(key, unit, pitch);
        ring.overlap[L + j] = dot(key, unit + pitch, pitch);
        load_row(plan.ring_d.dtype, call.ring_d, d_at + j * heads.V, 1, heads.V, ring.updates + j * heads.V);
    }
    return ring;
}

// products[0..1][rows]: the checkpoint's rows times k and q.
template <class T>
inline void pair_products(
    const T *state, int64_t rows, int64_t K, const float *unit, int64_t pitch, float *with_key, float *with_query,
    const T *next) {
    for (int64_t begin = 0; begin < rows; begin += 8) {
        int count = int(std::min<int64_t>(8, rows - begin));
        const T *block = state + begin * K;
        if (next)
            for (int64_t i = 0; i < count * K; i += 64 / sizeof(T)) __builtin_prefetch(next + begin * K + i, 0, 2);
        if (count == 8) {
            float products[16];
            dots<8, 2>(block, K, unit, pitch, products);
            std::memcpy(with_key + begin, products, 32);
            std::memcpy(with_query + begin, products + 8, 32);
        } else {
            for (int r = 0; r < count; r++) {
                float pair[2];
                row_dots(block + r * K, K, unit, pitch, 2, pair);
                with_key[begin + r] = pair[0];
                with_query[begin + r] = pair[1];
            }
        }
    }
}

// S <- decay S + sum_j factor[j] update[j] key[j]^T over rows begin.. of a state, each update `V` apart.
template <class T>
inline void fold_ring(
    T *state, int64_t rows, int64_t K, float decay, const Ring &ring, int64_t begin, int64_t V, int64_t pitch,
    const float *factors, const float *key, const float *d) {
    constexpr int N = 4;
    for (int64_t r = 0; r < rows; r++) {
        T *row = state + r * K;
        auto added = [&](int64_t p) {
            vf x = load(key + p) * d[r];
            for (int64_t j = 0; j < ring.length; j++)
                x += load(ring.keys + j * pitch + p) * (factors[j] * ring.updates[j * V + begin + r]);
            return x;
        };
        int64_t p = 0;
        for (; p + N * W <= K; p += N * W) {
            vf x[N];
            for (int i = 0; i < N; i++) x[i] = load(key + p + i * W) * d[r];
            for (int64_t j = 0; j < ring.length; j++) {
                float weight = factors[j] * ring.updates[j * V + begin + r];
                for (int i = 0; i < N; i++) x[i] += load(ring.keys + j * pitch + p + i * W) * weight;
            }
            for (int i = 0; i < N; i++) store(row + p + i * W, load(row + p + i * W) * decay + x[i]);
        }
        for (; p + W <= K; p += W) store(row + p, load(row + p) * decay + added(p));
        if (p < K) store_part(row + p, load_part(row + p, K - p) * decay + added(p), K - p);
    }
}

template <class T>
inline int replay_typed(const DecodePlan &plan, const DecodeCall &call) {
    const Heads &heads = plan.heads;
    int64_t size = heads.V * heads.K, L = plan.window, pitch = round_up(heads.K, W), ratio = heads.HV / heads.HK;
    return for_decode_items(
        plan, call, 5 * heads.V + L + ring_floats(plan, pitch),
        [&](const DecodeItem &item, int64_t slot, int64_t token, const float *unit, int64_t, float key_query,
            float *extra, bool more) {
            float *v = extra, *out = v + heads.V, *d = out + heads.V, *with_key = d + heads.V,
                  *with_query = with_key + heads.V, *factors = with_query + heads.V;
            int64_t rows = item.end - item.begin;
            int64_t position = std::clamp<int64_t>(index_at(plan.write_pos, call.write_pos, item.request), 0, L - 1);
            bool flush = position == L - 1 ||
                         (plan.has_flush && index_at(plan.flush, call.flush, item.request) != 0);
            HeadGates gates = head_gates(plan, call, token, item.head);
            load_values(plan, call, token, item.head, item.begin, item.end, v);
            Ring ring = load_ring(plan, call, slot, item.head, position, pitch, unit, factors + L);
            T *state = (T *)call.state + slot * plan.state.stride[0] + item.head * size + item.begin * heads.K;
            bool adjacent = more && (item.end < heads.V || item.head + 1 < heads.HV);
            pair_products(
                state, rows, heads.K, unit, pitch, with_key, with_query, adjacent ? state + rows * heads.K : nullptr);
            for (int64_t r = 0; r < rows; r++) {
                float key_product = ring.total * with_key[r], query_product = ring.total * with_query[r];
                for (int64_t j = 0; j < position; j++) {
                    float update = ring.decay[j] * ring.updates[j * heads.V + item.begin + r];
                    key_product += ring.overlap[j] * update;
                    query_product += ring.overlap[L + j] * update;
                }
                d[r] = gates.beta * (v[r] - gates.alpha * key_product);
                out[r] = gates.alpha * query_product + key_query * d[r];
            }
            store_row(plan.v.dtype, call.out, (token * heads.HV + item.head) * heads.V + item.begin, 1, rows, out);
            if (flush) {
                for (int64_t j = 0; j < position; j++) factors[j] = gates.alpha * ring.decay[j];
                fold_ring(
                    state, rows, heads.K, ring.total * gates.alpha, ring, item.begin, heads.V, pitch, factors, unit, d);
                return;
            }
            int64_t d_at = slot * plan.ring_d.stride[0] + (item.head * L + position) * heads.V + item.begin;
            store_row(plan.ring_d.dtype, call.ring_d, d_at, 1, rows, d);
            if (item.begin != 0) return;
            ((float *)call.ring_g)[slot * plan.ring_g.stride[0] + item.head * L + position] = gates.log_decay;
            if (item.head % ratio == 0) {
                int64_t k_at = slot * plan.ring_k.stride[0] + (item.head / ratio * L + position) * heads.K;
                store_row(plan.ring_k.dtype, call.ring_k, k_at, 1, heads.K, unit);
            }
        });
}

inline int replay(const DecodePlan &plan, const DecodeCall &call) {
    return with_type(plan.state.dtype, [&](auto *type) {
        return replay_typed<std::remove_pointer_t<decltype(type)>>(plan, call);
    });
}

}  // namespace gdn
