// Gates and normalisation. A value's bits depend on its own inputs alone, not on its place in a vector.
#pragma once
#include <cfloat>

#include "rows.h"

namespace gdn {

constexpr double FORGOTTEN = -1e5;  // stands for any stronger log decay: e^x is 0 and differences of sums stay exact

// g = -exp(A_log) softplus(x), where fp32 would lose it: in fp64, finite for finite inputs.
inline float exact_log_decay(float A_log, float x) {
    double rate = std::exp(std::min<double>(A_log, 600.0));
    double softplus = x > 20.0f ? x : std::log1p(std::exp((double)x));
    return (float)std::max(-rate * softplus, (double)-FLT_MAX);
}

// Of n <= W heads; log_decay, decay and beta are fp32, any of them may be null.
__attribute__((noinline)) inline void gates_of(
    const float *a, const float *b, const float *A_log, const float *dt_bias, int64_t n, float *log_decay, float *decay,
    float *beta) {
    vf x = load(a) + load(dt_bias);
    vf rate = load(A_log);
    // softplus(x) = max(x, 0) + log1p(e), e = exp(-|x|); log1p(e) = 2 atanh(e / (2 + e))
    vf magnitude = larger(x, -x);
    vf e = exponential(-magnitude);
    vf t = e / (2.0f + e), t2 = t * t;
    vf series = t2 * (1.0f / 15) + 1.0f / 13;
    series = series * t2 + 1.0f / 11;
    series = series * t2 + 1.0f / 9;
    series = series * t2 + 1.0f / 7;
    series = series * t2 + 1.0f / 5;
    series = series * t2 + 1.0f / 3;
    vf softplus = larger(x, vf{}) + 2.0f * (t + t * t2 * series);
    softplus = select(x > 20.0f, x, softplus);
    vf g = -exponential(smaller(rate, broadcast(88.0f))) * softplus;
    // also where a comparison fails because of a NaN
    vi plain = (x > -80.0f) & (rate < 80.0f) & (rate > -80.0f) & (g > -1e37f);
    for (int64_t i = 0; i < n; i++)
        if (!plain[i]) g[i] = exact_log_decay(A_log[i], x[i]);
    float values[W];
    if (log_decay) {
        store(values, g);
        std::memcpy(log_decay, values, n * 4);
    }
    if (decay) {
        store(values, exponential(g));
        std::memcpy(decay, values, n * 4);
    }
    if (beta) {
        store(values, sigmoid(load(b)));
        std::memcpy(beta, values, n * 4);
    }
}

// Gates of heads first .. first + count - 1 of one token.
inline void token_gates(
    const View &a_view, const void *a, const View &b_view, const void *b, const View &A_view, const void *A_log,
    const View &dt_view, const void *dt_bias, int64_t token, int64_t first, int64_t count, float *log_decay,
    float *decay, float *beta) {
    for (int64_t h = 0; h < count; h += W) {
        int64_t n = std::min<int64_t>(W, count - h), head = first + h;
        float in[4][W] = {};
        load_row(a_view.dtype, a, token * a_view.stride[0] + head * a_view.stride[1], a_view.stride[1], n, in[0]);
        load_row(b_view.dtype, b, token * b_view.stride[0] + head * b_view.stride[1], b_view.stride[1], n, in[1]);
        load_row(A_view.dtype, A_log, head * A_view.stride[0], A_view.stride[0], n, in[2]);
        load_row(dt_view.dtype, dt_bias, head * dt_view.stride[0], dt_view.stride[0], n, in[3]);
        gates_of(
            in[0], in[1], in[2], in[3], n, log_decay ? log_decay + h : nullptr, decay ? decay + h : nullptr,
            beta ? beta + h : nullptr);
    }
}

// x . y over n padded elements (a multiple of W).
inline float dot(const float *x, const float *y, int64_t n) {
    vf total{};
    for (int64_t i = 0; i < n; i += W) total += load(x + i) * load(y + i);
    return sum(total);
}

inline float inverse_norm(const float *x, int64_t padded) { return 1.0f / std::sqrt(dot(x, x, padded) + 1e-6f); }

// One head's row of q or k, normalised, times `scale`, padded with zeros to `padded` elements.
inline void load_unit(
    const View &view, const void *base, int64_t token, int64_t head, int64_t K, int64_t padded, float scale,
    float *target) {
    load_row(view.dtype, base, token * view.stride[0] + head * view.stride[1], view.stride[2], K, target);
    std::fill(target + K, target + padded, 0.0f);
    float factor = inverse_norm(target, padded) * scale;
    for (int64_t i = 0; i < padded; i += W) store(target + i, load(target + i) * factor);
}

inline int gating(const GatingPlan &plan, const GatingCall &call) {
    parallel(worth(call.threads, plan.tokens * plan.heads, 2048), plan.tokens, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++)
            token_gates(
                plan.a, call.a, plan.b, call.b, plan.A_log, call.A_log, plan.dt_bias, call.dt_bias, token, 0, plan.heads,
                call.g + token * plan.heads, nullptr, call.beta + token * plan.heads);
    });
    return DONE;
}

inline int split(const SplitPlan &plan, const SplitCall &call) {
    const int64_t columns[3] = {plan.key_columns, plan.key_columns, plan.value_columns};
    char *const targets[3] = {(char *)call.q, (char *)call.k, (char *)call.v};
    int64_t row_bytes = (2 * plan.key_columns + plan.value_columns) * plan.bytes;
    parallel(worth(call.threads, plan.tokens * row_bytes, 1 << 17), plan.tokens, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const char *source = (const char *)call.rows + token * plan.rows.stride[0] * plan.bytes;
            int64_t step = plan.rows.stride[1] * plan.bytes;
            for (int part = 0; part < 3; part++) {
                char *target = targets[part] + token * columns[part] * plan.bytes;
                if (plan.rows.stride[1] == 1) {
                    std::memcpy(target, source, columns[part] * plan.bytes);
                } else {
                    for (int64_t i = 0; i < columns[part]; i++)
                        std::memcpy(target + i * plan.bytes, source + i * step, plan.bytes);
                }
                source += columns[part] * step;
            }
        }
    });
    return DONE;
}

}  // namespace gdn
