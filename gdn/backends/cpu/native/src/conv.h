// The causal depthwise convolution over blocks of channels, staged as fp32 rows: one row a token, one row a tap.
#pragma once
#include <array>
#include <type_traits>

#include "rows.h"

namespace gdn {

constexpr int64_t BLOCK = 512;   // channels
constexpr int64_t TOKENS = 16;   // tokens staged at a time

// rows[j * BLOCK + c] = source[c * N + j]
template <int N, class T>
inline void deinterleave(const T *source, int64_t n, float *rows) {
    for (int64_t c = 0; c < n; c++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) rows[j * BLOCK + c] = to_float(source[c * N + j]);
}

#if defined(__AVX512BW__)
// Sixteen 16-bit elements, every N-th from `first`, of up to 64 in two registers.
template <int N>
inline __m256i every(__m512i low, __m512i high, int first) {
    static const auto ORDER = [] {
        std::array<std::array<uint16_t, 32>, N> order{};
        for (int j = 0; j < N; j++)
            for (int c = 0; c < 16; c++) order[j][c] = uint16_t(c * N + j);
        return order;
    }();
    __m512i order = _mm512_loadu_si512(ORDER[first].data());
    return _mm512_castsi512_si256(_mm512_permutex2var_epi16(low, order, high));
}

inline __m512i load_words(const void *source, int64_t count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1, source);
}

// As the general form, sixteen channels at a time.
template <int N>
inline void deinterleave(const bf16 *source, int64_t n, float *rows) {
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
        __m512i low = _mm512_loadu_si512(source + c * N), high = load_words(source + c * N + 32, 16 * N - 32);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++)
            _mm512_storeu_si512(
                rows + j * BLOCK + c, _mm512_slli_epi32(_mm512_cvtepu16_epi32(every<N>(low, high, j)), 16));
    }
    for (; c < n; c++)
        for (int j = 0; j < N; j++) rows[j * BLOCK + c] = to_float(source[c * N + j]);
}

// Three columns of n channels back into their places, sixteen channels at a time.
inline void interleave3(bf16 *target, int64_t n, const float *const *columns) {
    static const auto ORDER = [] {
        std::array<std::array<uint16_t, 32>, 4> order{};  // low 32 words: from columns 0 and 1, then column 2; high 16
        for (int i = 0; i < 48; i++) {
            int column = i % 3, channel = i / 3;
            order[i / 32][i % 32] = uint16_t(column < 2 ? column * 16 + channel : 0);
            order[2 + i / 32][i % 32] = uint16_t(column < 2 ? i % 32 : 32 + channel);
        }
        return order;
    }();
    int64_t c = 0;
    for (; c + 16 <= n; c += 16) {
        alignas(64) bf16 words[3][16];
        for (int j = 0; j < 3; j++) store(words[j], load(columns[j] + c));
        __m512i pair = _mm512_load_si512(words), last = _mm512_castsi256_si512(_mm256_load_si256((__m256i *)words[2]));
        auto merged = [&](int half) {
            __m512i placed = _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER[half].data()), pair);
            return _mm512_permutex2var_epi16(placed, _mm512_loadu_si512(ORDER[2 + half].data()), last);
        };
        _mm512_storeu_si512(target + c * 3, merged(0));
        _mm256_storeu_si256((__m256i *)(target + c * 3 + 32), _mm512_castsi512_si256(merged(1)));
    }
    for (; c < n; c++)
        for (int j = 0; j < 3; j++) from_float(target + c * 3 + j, columns[j][c]);
}
#endif

// `columns` columns of n channels from element `offset` on, one fp32 row each.
inline void load_columns(
    int64_t dtype, const void *base, int64_t offset, int64_t channel, int64_t column, int64_t columns, int64_t n,
    float *rows) {
    with_type(dtype, [&](auto *type) {
        auto *source = (decltype(type))base + offset;
        if (column == 1 && channel == 3 && columns == 3) return deinterleave<3>(source, n, rows);
        if (column == 1 && channel == 4 && columns == 4) return deinterleave<4>(source, n, rows);
        for (int64_t j = 0; j < columns; j++) load_row(source + j * column, channel, n, rows + j * BLOCK);
    });
}

// The reverse of `load_columns`, from one pointer a column.
inline void store_columns(
    int64_t dtype, void *base, int64_t offset, int64_t channel, int64_t column, int64_t columns, int64_t n,
    const float *const *sources) {
    with_type(dtype, [&](auto *type) {
        auto *target = (decltype(type))base + offset;
#if defined(__AVX512BW__)
        if constexpr (std::is_same_v<decltype(target), bf16 *>)
            if (column == 1 && channel == 3 && columns == 3) return interleave3(target, n, sources);
#endif
        for (int64_t j = 0; j < columns; j++) store_row(target + j * column, channel, n, sources[j]);
    });
}

// target = act(bias + sum_j taps[j] inputs[j]); all rows hold n channels padded to a multiple of W.
inline void convolve(
    const float *taps, const float *bias, const float *const *inputs, int64_t width, int64_t n, bool silu,
    float *target) {
    auto run = [&](auto taps_of) {
        for (int64_t c = 0; c < n; c += W) {
            vf total = load(bias + c);
            for (int64_t j = 0; j < taps_of(width); j++) total += load(inputs[j] + c) * load(taps + j * BLOCK + c);
            store(target + c, silu ? total * sigmoid(total) : total);
        }
    };
    if (width == 4)
        run([](int64_t) { return 4; });
    else
        run([](int64_t w) { return w; });
}

// Taps and bias of one block of channels.
struct Filter {
    float *taps, *bias;

    static int64_t bytes(int64_t width) { return room<float>(width * BLOCK) + room<float>(BLOCK); }

    Filter(Scratch &scratch, int64_t width)
        : taps(scratch.take<float>(width * BLOCK)), bias(scratch.take<float>(BLOCK)) {
        std::fill(taps, taps + width * BLOCK, 0.0f);
        std::fill(bias, bias + BLOCK, 0.0f);
    }

    template <class Plan, class Call>
    void load(const Plan &plan, const Call &call, int64_t channel, int64_t n) {
        const View &weight = plan.weight;
        load_columns(
            weight.dtype, call.weight, channel * weight.stride[0], weight.stride[0], weight.stride[1], plan.width, n,
            taps);
        if (plan.has_bias)
            load_row(plan.bias.dtype, call.bias, channel * plan.bias.stride[0], plan.bias.stride[0], n, bias);
    }
};

inline int64_t blocks_of(int64_t dim) { return (dim + BLOCK - 1) / BLOCK; }

// One sequence's tokens through one block of channels.
inline void extend_block(
    const ConvExtendPlan &plan, const ConvExtendCall &call, int64_t sequence, int64_t slot, int64_t channel, int64_t n,
    const Filter &filter, float *window, float *result, const float **inputs) {
    const View &x = plan.x, &state = plan.state;
    int64_t begin = index_at(plan.offsets, call.offsets, sequence);
    int64_t end = index_at(plan.offsets, call.offsets, sequence + 1), history = plan.width - 1;
    if (begin == end) return;
    bool known = !plan.has_flags || ((const uint8_t *)call.flags)[sequence * plan.flags.stride[0]];
    int64_t state_at = slot * state.stride[0] + channel * state.stride[1];
    if (known)
        load_columns(state.dtype, call.state, state_at, state.stride[1], state.stride[2], history, n, window);
    else
        for (int64_t j = 0; j < history; j++) std::fill(window + j * BLOCK, window + j * BLOCK + n, 0.0f);
    for (int64_t token = begin; token < end; token += TOKENS) {
        int64_t count = std::min(TOKENS, end - token);
        for (int64_t t = 0; t < count; t++)
            load_row(
                x.dtype, call.x, channel * x.stride[0] + (token + t) * x.stride[1], x.stride[0], n,
                window + (history + t) * BLOCK);
        for (int64_t t = 0; t < count; t++) {
            for (int64_t j = 0; j < plan.width; j++) inputs[j] = window + (t + j) * BLOCK;
            convolve(filter.taps, filter.bias, inputs, plan.width, n, plan.silu, result);
            store_row(
                plan.out.dtype, call.out, channel * plan.out.stride[0] + (token + t) * plan.out.stride[1],
                plan.out.stride[0], n, result);
        }
        for (int64_t j = 0; j < history; j++)
            std::memmove(window + j * BLOCK, window + (count + j) * BLOCK, n * sizeof(float));
    }
    for (int64_t j = 0; j < history; j++) inputs[j] = window + j * BLOCK;
    store_columns(state.dtype, call.state, state_at, state.stride[1], state.stride[2], history, n, inputs);
}

inline int conv_extend(const ConvExtendPlan &plan, const ConvExtendCall &call) {
    if (!offsets_ascend(plan.offsets, call.offsets, plan.requests, plan.tokens)) return BAD_OFFSETS;
    int64_t blocks = blocks_of(plan.dim), history = plan.width - 1;
    int64_t threads = worth(call.threads, plan.dim * plan.tokens, 1 << 14);
    parallel(threads, blocks, [&](int64_t first, int64_t last) {
        Scratch &scratch = Scratch::of_thread();
        scratch.open(
            Filter::bytes(plan.width) + room<float>((history + TOKENS) * BLOCK) + room<float>(BLOCK) +
            room<const float *>(plan.width));
        Filter filter(scratch, plan.width);
        float *window = scratch.take<float>((history + TOKENS) * BLOCK), *result = scratch.take<float>(BLOCK);
        const float **inputs = scratch.take<const float *>(plan.width);
        std::fill(window, window + (history + TOKENS) * BLOCK, 0.0f);
        for (int64_t block = first; block < last; block++) {
            int64_t channel = block * BLOCK, n = std::min(BLOCK, plan.dim - channel), at = 0;
            filter.load(plan, call, channel, n);
            auto zero_until = [&](int64_t token) {
                std::fill(result, result + n, 0.0f);
                for (; at < token; at++)
                    store_row(
                        plan.out.dtype, call.out, channel * plan.out.stride[0] + at * plan.out.stride[1],
                        plan.out.stride[0], n, result);
            };
            for (int64_t sequence = 0; sequence < plan.requests; sequence++) {
                int64_t slot = slot_at(plan.index, call.index, sequence, plan.slots);
                if (slot < 0) continue;
                zero_until(index_at(plan.offsets, call.offsets, sequence));
                extend_block(plan, call, sequence, slot, channel, n, filter, window, result, inputs);
                at = std::max(at, index_at(plan.offsets, call.offsets, sequence + 1));
            }
            zero_until(plan.tokens);
        }
    });
    return DONE;
}

// Parent of every draft: that of a first child is the draft that links it, that of a sibling its sibling's. The root's
// is 0, as is that of drafts no link reaches; links that don't point forward are ignored.
inline void draft_parents(const ConvUpdatePlan &plan, const ConvUpdateCall &call, int64_t request, int64_t *parents) {
    std::fill(parents, parents + plan.drafts, int64_t(0));
    for (int64_t draft = 0; draft < plan.drafts; draft++) {
        int64_t child = index_at(plan.child, call.child, request, draft);
        int64_t sibling = index_at(plan.sibling, call.sibling, request, draft);
        int64_t own = parents[draft];
        if (child > draft && child < plan.drafts) parents[child] = draft;
        if (sibling > draft && sibling < plan.drafts) parents[sibling] = own;
    }
}

inline void store_index(const View &view, void *base, int64_t i, int64_t j, int64_t value) {
    int64_t at = i * view.stride[0] + j * view.stride[1];
    if (view.dtype == I64)
        ((int64_t *)base)[at] = value;
    else
        ((int32_t *)base)[at] = (int32_t)value;
}

struct UpdateMemory {
    float *window, *result;  // [history + drafts, BLOCK], [BLOCK]
    const float **inputs;    // [width]
    int64_t *parents;        // [drafts]
};

// One request through one block of channels.
inline void update_block(
    const ConvUpdatePlan &plan, const ConvUpdateCall &call, int64_t request, int64_t slot, int64_t channel, int64_t n,
    const Filter &filter, const UpdateMemory &memory) {
    const View &x = plan.x, &state = plan.state, &out = plan.out, &buffer = plan.window;
    int64_t history = plan.width - 1, state_at = slot * state.stride[0] + channel * state.stride[1];
    load_columns(state.dtype, call.state, state_at, state.stride[1], state.stride[2], history, n, memory.window);
    for (int64_t draft = 0; draft < plan.drafts; draft++)
        load_row(
            x.dtype, call.x, request * x.stride[0] + channel * x.stride[1] + draft * x.stride[2], x.stride[1], n,
            memory.window + (history + draft) * BLOCK);
    if (plan.has_tree) {
        draft_parents(plan, call, request, memory.parents);
        if (plan.has_parents && channel == 0)
            for (int64_t draft = 0; draft < plan.drafts; draft++)
                store_index(plan.parents, call.parents, request, draft, memory.parents[draft]);
    }
    int64_t row = -1;
    if (plan.has_window) {
        row = plan.has_row ? index_at(plan.row, call.row, request) : request;
        if (row >= plan.rows) row = -1;
    }
    for (int64_t draft = 0; draft < plan.drafts; draft++) {
        // rows of the window on the path that ends with the draft; before the root the slot's columns, newest first
        int64_t at = history + draft;
        for (int64_t j = history; j >= 0; j--) {
            memory.inputs[j] = memory.window + at * BLOCK;
            at = plan.has_tree && at > history ? history + memory.parents[at - history] : at - 1;
        }
        convolve(filter.taps, filter.bias, memory.inputs, plan.width, n, plan.silu, memory.result);
        store_row(
            out.dtype, call.out, request * out.stride[0] + channel * out.stride[1] + draft * out.stride[2],
            out.stride[1], n, memory.result);
        if (row >= 0)
            store_columns(
                buffer.dtype, call.window,
                row * buffer.stride[0] + draft * buffer.stride[1] + channel * buffer.stride[2], buffer.stride[2],
                buffer.stride[3], history, n, memory.inputs + 1);
    }
    if (!plan.has_tree) {
        for (int64_t j = 0; j < history; j++) memory.inputs[j] = memory.window + (plan.drafts + j) * BLOCK;
        store_columns(
            state.dtype, call.state, state_at, state.stride[1], state.stride[2], history, n, memory.inputs);
    }
}

inline int conv_update(const ConvUpdatePlan &plan, const ConvUpdateCall &call) {
    int64_t blocks = blocks_of(plan.dim), history = plan.width - 1;
    int64_t threads = worth(call.threads, plan.requests * plan.dim * plan.drafts, 1 << 12);
    parallel(threads, blocks * plan.requests, [&](int64_t first, int64_t last) {
        Scratch &scratch = Scratch::of_thread();
        scratch.open(
            Filter::bytes(plan.width) + room<float>((history + plan.drafts) * BLOCK) + room<float>(BLOCK) +
            room<const float *>(plan.width) + room<int64_t>(plan.drafts));
        Filter filter(scratch, plan.width);
        UpdateMemory memory{
            scratch.take<float>((history + plan.drafts) * BLOCK), scratch.take<float>(BLOCK),
            scratch.take<const float *>(plan.width), scratch.take<int64_t>(plan.drafts)};
        std::fill(memory.window, memory.window + (history + plan.drafts) * BLOCK, 0.0f);
        int64_t known = -1;
        for (int64_t at = first; at < last; at++) {
            int64_t request = at % plan.requests, block = at / plan.requests;
            int64_t channel = block * BLOCK, n = std::min(BLOCK, plan.dim - channel);
            int64_t slot = plan.has_index ? slot_at(plan.index, call.index, request, plan.slots)
                                          : request < plan.slots ? request : -1;
            if (slot < 0) {
                std::fill(memory.result, memory.result + n, 0.0f);
                for (int64_t draft = 0; draft < plan.drafts; draft++)
                    store_row(
                        plan.out.dtype, call.out,
                        request * plan.out.stride[0] + channel * plan.out.stride[1] + draft * plan.out.stride[2],
                        plan.out.stride[1], n, memory.result);
                continue;
            }
            if (block != known) filter.load(plan, call, channel, n);
            known = block;
            update_block(plan, call, request, slot, channel, n, filter, memory);
        }
    });
    return DONE;
}

}  // namespace gdn
