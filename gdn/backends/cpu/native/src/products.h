// Matrix products in cache: fp32, and bf16 with fp32 sums where the target has the instructions.
//
// Right operands and results are panels, NR columns wide. A bf16 right operand holds pairs: lane n of row p is
// elements 2p (low half) and 2p + 1 (high half) of column n.
#pragma once
#include "rows.h"

namespace gdn {

constexpr int NR = 2 * W;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MR = 8;
#else
constexpr int MR = 4;
#endif

#if defined(__AVX512BF16__)
constexpr bool BF16_PRODUCTS = true;
#else
constexpr bool BF16_PRODUCTS = false;
#endif

// C = keep C + A B over MR rows, A(m, p) at a[m * row + p * column], B(p, n) at b[p * b_pitch + n].
inline void multiply_rows(
    const float *a, int64_t row, int64_t column, const float *b, int64_t b_pitch, int64_t P, float *c, int64_t c_pitch,
    float keep) {
    vf sum[MR][2];
    if (keep == 0.0f) {
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) sum[m][0] = sum[m][1] = vf{};
    } else {
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            sum[m][0] = load(c + m * c_pitch) * keep;
            sum[m][1] = load(c + m * c_pitch + W) * keep;
        }
    }
    for (int64_t p = 0; p < P; p++) {
        vf left = load(b + p * b_pitch), right = load(b + p * b_pitch + W);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            float x = a[m * row + p * column];
            sum[m][0] += left * x;
            sum[m][1] += right * x;
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) {
        store(c + m * c_pitch, sum[m][0]);
        store(c + m * c_pitch + W, sum[m][1]);
    }
}

// The same over M rows, a multiple of MR.
inline void multiply(
    const float *a, int64_t row, int64_t column, const float *b, int64_t b_pitch, int64_t P, float *c, int64_t c_pitch,
    float keep, int64_t M) {
    for (int64_t m = 0; m < M; m += MR)
        multiply_rows(a + m * row, row, column, b, b_pitch, P, c + m * c_pitch, c_pitch, keep);
}

// Tile registers are configured once a thread and task.
struct Tiles {
#if defined(__AMX_BF16__)
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
#else
    Tiles() {}
#endif
    Tiles(const Tiles &) = delete;
};

#if defined(__AVX512BF16__)
// C = A B, or C + A B, over M rows (a multiple of 32) and P elements (a multiple of 32); a pitches count elements.
inline void multiply_bf16(
    const uint16_t *a, int64_t a_pitch, const uint32_t *b, int64_t b_pitch, int64_t P, float *c, int64_t c_pitch,
    bool add, int64_t M) {
#if defined(__AMX_BF16__)
    for (int64_t m = 0; m < M; m += 32) {
        float *top = c + m * c_pitch, *bottom = top + 16 * c_pitch;
        const int64_t c_bytes = c_pitch * 4, a_bytes = a_pitch * 2, b_bytes = b_pitch * 4;
        if (add) {
            _tile_loadd(0, top, c_bytes);
            _tile_loadd(1, top + 16, c_bytes);
            _tile_loadd(2, bottom, c_bytes);
            _tile_loadd(3, bottom + 16, c_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t p = 0; p < P; p += 32) {
            _tile_loadd(4, a + m * a_pitch + p, a_bytes);
            _tile_loadd(5, a + (m + 16) * a_pitch + p, a_bytes);
            _tile_loadd(6, b + p / 2 * b_pitch, b_bytes);
            _tile_loadd(7, b + p / 2 * b_pitch + 16, b_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, top, c_bytes);
        _tile_stored(1, top + 16, c_bytes);
        _tile_stored(2, bottom, c_bytes);
        _tile_stored(3, bottom + 16, c_bytes);
    }
#else
    for (int64_t m = 0; m < M; m += MR) {
        __m512 sum[MR][2];
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            const float *row = c + (m + i) * c_pitch;
            sum[i][0] = add ? _mm512_loadu_ps(row) : _mm512_setzero_ps();
            sum[i][1] = add ? _mm512_loadu_ps(row + W) : _mm512_setzero_ps();
        }
        for (int64_t p = 0; p < P; p += 2) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(b + p / 2 * b_pitch);
            __m512bh right = (__m512bh)_mm512_loadu_si512(b + p / 2 * b_pitch + W);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                int32_t pair;
                std::memcpy(&pair, a + (m + i) * a_pitch + p, 4);
                __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, left);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, right);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            _mm512_storeu_ps(c + (m + i) * c_pitch, sum[i][0]);
            _mm512_storeu_ps(c + (m + i) * c_pitch + W, sum[i][1]);
        }
    }
#endif
}

// One row of pairs: `low` in the lower halves, `high` in the upper.
inline void store_pairs(uint32_t *target, vf low, vf high) {
    alignas(64) static const uint16_t ORDER[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_storeu_si512(target, _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both));
}
#endif

// x[j][i] for x[i][j]
inline void transpose(vf (&x)[W]) {
#if defined(__AVX512F__)
    __m512 quad[16];
    for (int g = 0; g < 16; g += 4) {
        __m512d low01 = (__m512d)_mm512_unpacklo_ps((__m512)x[g], (__m512)x[g + 1]);
        __m512d high01 = (__m512d)_mm512_unpackhi_ps((__m512)x[g], (__m512)x[g + 1]);
        __m512d low23 = (__m512d)_mm512_unpacklo_ps((__m512)x[g + 2], (__m512)x[g + 3]);
        __m512d high23 = (__m512d)_mm512_unpackhi_ps((__m512)x[g + 2], (__m512)x[g + 3]);
        quad[g] = (__m512)_mm512_unpacklo_pd(low01, low23);
        quad[g + 1] = (__m512)_mm512_unpackhi_pd(low01, low23);
        quad[g + 2] = (__m512)_mm512_unpacklo_pd(high01, high23);
        quad[g + 3] = (__m512)_mm512_unpackhi_pd(high01, high23);
    }
    for (int c = 0; c < 4; c++) {
        __m512 even0 = _mm512_shuffle_f32x4(quad[c], quad[4 + c], 0x88);
        __m512 even1 = _mm512_shuffle_f32x4(quad[8 + c], quad[12 + c], 0x88);
        __m512 odd0 = _mm512_shuffle_f32x4(quad[c], quad[4 + c], 0xdd);
        __m512 odd1 = _mm512_shuffle_f32x4(quad[8 + c], quad[12 + c], 0xdd);
        x[c] = (vf)_mm512_shuffle_f32x4(even0, even1, 0x88);
        x[8 + c] = (vf)_mm512_shuffle_f32x4(even0, even1, 0xdd);
        x[4 + c] = (vf)_mm512_shuffle_f32x4(odd0, odd1, 0x88);
        x[12 + c] = (vf)_mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
#else
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            float above = x[j][i];
            x[j][i] = x[i][j];
            x[i][j] = above;
        }
#endif
}

// target[c * pitch + r] = source[r * source_pitch + c]; rows and columns are multiples of W.
inline void transpose_matrix(
    const float *source, int64_t source_pitch, int64_t rows, int64_t columns, float *target, int64_t pitch) {
    for (int64_t r = 0; r < rows; r += W)
        for (int64_t c = 0; c < columns; c += W) {
            vf x[W];
            for (int i = 0; i < W; i++) x[i] = load(source + (r + i) * source_pitch + c);
            transpose(x);
            for (int i = 0; i < W; i++) store(target + (c + i) * pitch + r, x[i]);
        }
}

// Rows v of a `[V, K]` state to a panel `[padded K, NR]`; what lies outside `count` rows or K columns is 0.
template <class T>
inline void load_panel(const T *state, int64_t K, int64_t padded, int64_t count, float *panel) {
    for (int64_t v = 0; v < NR; v += W)
        for (int64_t k = 0; k < padded; k += W) {
            vf x[W];
            for (int i = 0; i < W; i++) {
                const T *row = state + (v + i) * K + k;
                x[i] = v + i >= count || k >= K ? vf{} : k + W <= K ? load(row) : load_part(row, K - k);
            }
            transpose(x);
            for (int i = 0; i < W; i++) store(panel + (k + i) * NR + v, x[i]);
        }
}

template <class T>
inline void store_panel(const float *panel, int64_t K, int64_t count, T *state) {
    for (int64_t v = 0; v < NR; v += W)
        for (int64_t k = 0; k < K; k += W) {
            vf x[W];
            for (int i = 0; i < W; i++) x[i] = load(panel + (k + i) * NR + v);
            transpose(x);
            for (int i = 0; i < W && v + i < count; i++) {
                T *row = state + (v + i) * K + k;
                if (k + W <= K)
                    store(row, x[i]);
                else
                    store_part(row, x[i], K - k);
            }
        }
}

}  // namespace gdn
