// One token per request. With alpha = e^g and S the state before the token, both products with S come from one read:
//
//     d = beta (v - alpha S k)        o = alpha S q + (k . q) d        S <- alpha S + d k^T
#pragma once
#include <type_traits>

#include "gates.h"

namespace gdn {

// Rows of a state that a task must not split, so that bits don't depend on the number of tasks.
constexpr int64_t ROW_UNIT = 16;

// Parts of V rows that give every thread work where there are fewer states than threads.
inline int64_t parts_of(int64_t states, int64_t threads, int64_t V) {
    if (states >= threads || states == 0) return 1;
    return std::max<int64_t>(1, std::min((threads + states - 1) / states, V / ROW_UNIT));
}

inline int64_t part_begin(int64_t part, int64_t parts, int64_t V) {
    return part == parts ? V : V * part / parts / ROW_UNIT * ROW_UNIT;
}

// products[x * R + r]: row r of a state times the padded vector x, of R rows and X vectors `pitch` apart.
template <int R, int X, class T>
inline void dots(const T *rows, int64_t K, const float *vectors, int64_t pitch, float *products) {
    static_assert(R * X == 16, "sixteen sums at a time");
    vf sums[16] = {};
    int64_t full = K / W * W, tail = K - full;
    for (int64_t p = 0; p < full; p += W) {
        vf s[R];
        for (int r = 0; r < R; r++) s[r] = load(rows + r * K + p);
        for (int x = 0; x < X; x++) {
            vf y = load(vectors + x * pitch + p);
            for (int r = 0; r < R; r++) sums[x * R + r] += s[r] * y;
        }
    }
    if (tail) {
        for (int r = 0; r < R; r++) {
            vf s = load_part(rows + r * K + full, tail);
            for (int x = 0; x < X; x++) sums[x * R + r] += s * load(vectors + x * pitch + full);
        }
    }
    sums_of_16(sums, products);
}

// Products of one row with X vectors.
template <class T>
inline void row_dots(const T *row, int64_t K, const float *vectors, int64_t pitch, int X, float *products) {
    int64_t full = K / W * W, tail = K - full;
    for (int x = 0; x < X; x++) {
        vf total{};
        for (int64_t p = 0; p < full; p += W) total += load(row + p) * load(vectors + x * pitch + p);
        if (tail) total += load_part(row + full, tail) * load(vectors + x * pitch + full);
        products[x] = sum(total);
    }
}

template <class T>
inline void fetch(const T *line) {
    __builtin_prefetch(line, 1, 2);
}

// Steps `rows` rows of one state in place. `unit` holds k, then q at `pitch`. `next`: what to fetch meanwhile.
template <class T>
inline void step_state(
    T *state, int64_t rows, int64_t K, const float *unit, int64_t pitch, const float *v, float alpha, float beta,
    float key_query, float *out, const T *next) {
    constexpr int R = 8;
    int64_t full = K / W * W, tail = K - full;
    vf decay = broadcast(alpha);
    for (int64_t begin = 0; begin < rows; begin += R) {
        T *block = state + begin * K;
        int count = int(std::min<int64_t>(R, rows - begin));
        float products[2 * R] = {}, d[R];
        if (count == R) {
            dots<R, 2>(block, K, unit, pitch, products);
        } else {
            for (int r = 0; r < count; r++) {
                float pair[2];
                row_dots(block + r * K, K, unit, pitch, 2, pair);
                products[r] = pair[0];
                products[R + r] = pair[1];
            }
        }
        for (int r = 0; r < count; r++) {
            d[r] = beta * (v[begin + r] - alpha * products[r]);
            out[begin + r] = alpha * products[R + r] + key_query * d[r];
        }
        for (int64_t p = 0; p < full; p += W) {
            vf key = load(unit + p);
            if (next && p % (64 / sizeof(T)) == 0)
                for (int r = 0; r < count; r++) fetch(next + (begin + r) * K + p);
            for (int r = 0; r < count; r++) store(block + r * K + p, load(block + r * K + p) * decay + key * d[r]);
        }
        if (tail) {
            vf key = load(unit + full);
            for (int r = 0; r < count; r++)
                store_part(block + r * K + full, load_part(block + r * K + full, tail) * decay + key * d[r], tail);
        }
    }
}

// The token row of each request that decodes one; -1: none.
inline int64_t token_row(const DecodePlan &plan, const DecodeCall &call, int64_t request) {
    if (!plan.has_offsets) return request;
    int64_t begin = index_at(plan.offsets, call.offsets, request);
    return begin < index_at(plan.offsets, call.offsets, request + 1) ? begin : -1;
}

// What the tasks of decode and replay share: one request, one value head, one part of its rows.
struct DecodeItem {
    int64_t request, head, begin, end;
};

// body(item, slot, token row, unit k and q, their pitch, key . query, extra memory, whether items follow) for every item
// of a real request; other rows become zeros.
template <class F>
inline int for_decode_items(const DecodePlan &plan, const DecodeCall &call, int64_t extra_floats, F &&body) {
    const Heads &heads = plan.heads;
    int64_t pitch = round_up(heads.K, W), ratio = heads.HV / heads.HK;
    if (plan.has_offsets) {
        if (!offsets_ascend(plan.offsets, call.offsets, plan.requests, plan.tokens)) return BAD_OFFSETS;
        zero_row(plan.v.dtype, call.out, 0, plan.tokens * heads.HV * heads.V);
    }
    int64_t states = plan.requests * heads.HV;
    int64_t threads = worth(call.threads, states * heads.V * heads.K, 1 << 14);
    int64_t parts = parts_of(states, threads, heads.V);
    float scale = (float)call.scale;
    parallel(threads, states * parts, [&](int64_t first, int64_t last) {
        Scratch &scratch = Scratch::of_thread();
        scratch.open(room<float>(2 * pitch) + room<float>(extra_floats));
        float *unit = scratch.take<float>(2 * pitch), *extra = scratch.take<float>(extra_floats);
        int64_t known = -1;
        float key_query = 0;
        for (int64_t at = first; at < last; at++) {
            int64_t part = at % parts, head = at / parts % heads.HV, request = at / parts / heads.HV;
            DecodeItem item{request, head, part_begin(part, parts, heads.V), part_begin(part + 1, parts, heads.V)};
            int64_t slot = slot_at(plan.index, call.index, request, plan.slots);
            int64_t token = token_row(plan, call, request);
            if (slot < 0 || token < 0) {
                if (!plan.has_offsets)
                    zero_row(
                        plan.v.dtype, call.out, (request * heads.HV + head) * heads.V + item.begin,
                        item.end - item.begin);
                continue;
            }
            int64_t key_head = head / ratio;
            if (known != request * heads.HK + key_head) {
                known = request * heads.HK + key_head;
                load_unit(plan.k, call.k, token, key_head, heads.K, pitch, 1.0f, unit);
                load_unit(plan.q, call.q, token, key_head, heads.K, pitch, scale, unit + pitch);
                key_query = dot(unit, unit + pitch, pitch);
            }
            body(item, slot, token, unit, pitch, key_query, extra, at + 1 < last);
        }
    });
    return DONE;
}

struct HeadGates {
    float log_decay, alpha, beta;
};

template <class Plan, class Call>
inline HeadGates head_gates(const Plan &plan, const Call &call, int64_t token, int64_t head) {
    HeadGates gates;
    token_gates(
        plan.a, call.a, plan.b, call.b, plan.A_log, call.A_log, plan.dt_bias, call.dt_bias, token, head, 1,
        &gates.log_decay, &gates.alpha, &gates.beta);
    return gates;
}

// v of one head, rows begin..end-1.
template <class Plan, class Call>
inline void load_values(
    const Plan &plan, const Call &call, int64_t token, int64_t head, int64_t begin, int64_t end, float *target) {
    int64_t offset = token * plan.v.stride[0] + head * plan.v.stride[1] + begin * plan.v.stride[2];
    load_row(plan.v.dtype, call.v, offset, plan.v.stride[2], end - begin, target);
}

template <class T>
inline int decode_typed(const DecodePlan &plan, const DecodeCall &call) {
    const Heads &heads = plan.heads;
    int64_t size = heads.V * heads.K;
    return for_decode_items(
        plan, call, 2 * heads.V,
        [&](const DecodeItem &item, int64_t slot, int64_t token, const float *unit, int64_t pitch, float key_query,
            float *extra, bool more) {
            HeadGates gates = head_gates(plan, call, token, item.head);
            float *v = extra, *out = extra + heads.V;
            int64_t rows = item.end - item.begin;
            load_values(plan, call, token, item.head, item.begin, item.end, v);
            T *pool = (T *)call.state;
            T *state = pool + slot * plan.state.stride[0] + item.head * size + item.begin * heads.K;
            const T *next = nullptr;
            if (more) {
                if (item.end < heads.V) {
                    next = state + rows * heads.K;
                } else if (item.head + 1 < heads.HV) {
                    next = pool + slot * plan.state.stride[0] + (item.head + 1) * size;
                } else {
                    int64_t following = slot_at(plan.index, call.index, item.request + 1, plan.slots);
                    if (following >= 0) next = pool + following * plan.state.stride[0];
                }
            }
            step_state(state, rows, heads.K, unit, pitch, v, gates.alpha, gates.beta, key_query, out, next);
            store_row(
                plan.v.dtype, call.out, (token * heads.HV + item.head) * heads.V + item.begin, 1, rows, out);
        });
}

inline int decode(const DecodePlan &plan, const DecodeCall &call) {
    return with_type(plan.state.dtype, [&](auto *type) {
        return decode_typed<std::remove_pointer_t<decltype(type)>>(plan, call);
    });
}

}  // namespace gdn
