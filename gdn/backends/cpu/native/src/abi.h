// What Python passes: one plan per argument signature, and one call with the addresses. Mirrored in `structures.py`.
#pragma once
#include <cstdint>

namespace gdn {

enum Dtype : int64_t { F32 = 0, F16 = 1, BF16 = 2, I32 = 3, I64 = 4 };

// Element type and strides, in elements, of a tensor; unused strides are 0.
struct View {
    int64_t dtype;
    int64_t stride[4];
};

struct Heads {
    int64_t HK, HV, K, V;
};

// decode, packed_decode and replay_decode.
struct DecodePlan {
    int64_t tokens, requests, slots, has_offsets;
    Heads heads;
    View q, k, v;          // token, head, element
    View a, b;             // token, head
    View A_log, dt_bias;   // head
    View state;            // slot; the rest is contiguous
    View index, offsets;   // request
    View ring_d, ring_k;   // slot; the rest is contiguous
    View ring_g;           // slot
    View write_pos, flush; // request
    int64_t window, has_flush;
};

struct DecodeCall {
    const void *q, *k, *v, *a, *b, *A_log, *dt_bias;
    void *state;
    const void *index, *offsets;
    void *out;
    void *ring_d, *ring_k, *ring_g;
    const void *write_pos, *flush;
    double scale;
    int64_t threads;
};

struct VerifyPlan {
    int64_t tokens, requests, slots, rows, steps, has_buffer, has_parents, parent_columns;
    Heads heads;
    View q, k, v, a, b, A_log, dt_bias;
    View state, index, offsets;
    View buffer;      // row, step; the rest is contiguous
    View buffer_row;  // request
    View parents;     // request, draft
};

struct VerifyCall {
    const void *q, *k, *v, *a, *b, *A_log, *dt_bias, *state, *index, *offsets;
    void *buffer;
    const void *buffer_row, *parents;
    void *out;
    double scale;
    int64_t threads;
};

struct ExtendPlan {
    int64_t tokens, requests, slots, has_snapshots;
    Heads heads;
    View q, k, v;      // token, head, element
    View g, beta;      // token, head; fp32
    View state, index, offsets;
    View snapshot_chunk, snapshot_slot;
};

struct ExtendCall {
    const void *q, *k, *v, *g, *beta;
    void *state;
    const void *index, *offsets, *snapshot_chunk, *snapshot_slot;
    void *chunk_states;  // contiguous, or null
    void *out;
    double scale;
    int64_t threads;
};

struct GatingPlan {
    int64_t tokens, heads;
    View a, b, A_log, dt_bias;
};

struct GatingCall {
    const void *a, *b, *A_log, *dt_bias;
    float *g, *beta;  // contiguous
    int64_t threads;
};

struct SplitPlan {
    int64_t tokens, bytes, key_columns, value_columns;
    View rows;  // token, column
};

struct SplitCall {
    const void *rows;
    void *q, *k, *v;  // contiguous
    int64_t threads;
};

struct ConvExtendPlan {
    int64_t dim, tokens, width, requests, slots, has_bias, has_flags, silu;
    View x, out;  // channel, token
    View weight;  // channel, tap
    View bias;    // channel
    View state;   // slot, channel, column
    View index, offsets, flags;
};

struct ConvExtendCall {
    const void *x, *weight, *bias;
    void *state;
    const void *index, *offsets, *flags;
    void *out;
    int64_t threads;
};

struct ConvUpdatePlan {
    int64_t requests, dim, drafts, width, slots, rows, has_bias, has_index, has_window, has_row, has_tree, has_parents,
        silu;
    View x, out;   // request, channel, draft
    View weight, bias, state;
    View index;    // request
    View window;   // row, draft, channel, column
    View row;      // request
    View child, sibling, parents;  // request, draft
};

struct ConvUpdateCall {
    const void *x, *weight, *bias;
    void *state;
    const void *index;
    void *window;
    const void *row, *child, *sibling;
    void *parents;
    void *out;
    int64_t threads;
};

enum Status : int { DONE = 0, BAD_OFFSETS = 1 };

}  // namespace gdn
