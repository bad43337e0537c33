// One fp32 vector of the width that the compiler's target has, and its conversions from and to 16-bit floats.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace gdn {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline vf broadcast(float x) { return x - vf{}; }

inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
inline vf larger(vf a, vf b) { return select(a > b, a, b); }
inline vf smaller(vf a, vf b) { return select(a < b, a, b); }

inline float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    float x;
    if (exponent == 0) {
        x = float(fraction) * 0x1p-24f;
        return sign ? -x : x;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // subnormal or zero: the unit in the last place is 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return sign | uint16_t(std::lrintf(magnitude * 0x1p24f));
    }
    return sign | uint16_t((bits + 0xfff + ((bits >> 13) & 1) - 0x38000000) >> 13);
}

template <class V, class T>
inline V load_raw(const T *p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline vf load(const float *p) { return load_raw<vf>(p); }
inline vf load(const bf16 *p) { return (vf)(__builtin_convertvector(load_raw<vh>(p), vu) << 16); }
inline vf load(const f16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(load_raw<__m256i>(p));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(load_raw<__m128i>(p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)load_raw<vh>(p));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = half_to_float(p[i].bits);
    return v;
#endif
}

// bf16 in the upper half of each lane, rounded to nearest even; the lower half is rubbish.
inline vu rounded_bf16(vf x) {
    vu bits = (vu)x;
    vu rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vu nan = (vu)(x != x);
    return (rounded & ~nan) | ((bits | 0x400000) & nan);
}

inline void store(float *p, vf x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16 *p, vf x) {
#if defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)x);
#else
    vh h = __builtin_convertvector(rounded_bf16(x) >> 16, vh);
#endif
    std::memcpy(p, &h, sizeof h);
}
inline void store(f16 *p, vf x) {
#if defined(__AVX512F__)
    __m256i h = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
#elif defined(__AVX2__)
    __m128i h = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
#elif defined(__aarch64__)
    float16x4_t h = vcvt_f16_f32((float32x4_t)x);
    std::memcpy(p, &h, sizeof h);
#else
    for (int i = 0; i < W; i++) p[i].bits = float_to_half(x[i]);
#endif
}

// The first n < W elements; the others are 0.
template <class T>
inline vf load_part(const T *p, int64_t n) {
    T buffer[W] = {};
    std::memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}

template <class T>
inline void store_part(T *p, vf x, int64_t n) {
    T buffer[W];
    store(buffer, x);
    std::memcpy(p, buffer, n * sizeof(T));
}

inline float sum(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)x);
#else
    float parts[W];
    store(parts, x);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
#endif
}

// out[i] = sum of x[i]
inline void sums_of_16(const vf (&x)[16], float *out) {
#if defined(__AVX512F__)
    __m512 quads[4];
    for (int i = 0; i < 4; i++) {
        __m512 a = (__m512)x[4 * i], b = (__m512)x[4 * i + 1], c = (__m512)x[4 * i + 2], d = (__m512)x[4 * i + 3];
        __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        quads[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    auto fold = [](__m512 low, __m512 high) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
    };
    store(out, (vf)fold(fold(quads[0], quads[1]), fold(quads[2], quads[3])));
#else
    for (int i = 0; i < 16; i++) out[i] = sum(x[i]);
#endif
}

// e^x to about one unit in the last place, 0 below -87.3; x must not exceed 88.
inline vf exponential(vf x) {
    constexpr float LOWEST = -87.3f, MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vi tiny = x < LOWEST;
    x = select(tiny, broadcast(LOWEST), x);
    vf shifted = x * 1.44269504088896341f + MAGIC;
    vf whole = shifted - MAGIC;
    vf r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    vf y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    vf power = (vf)(((vi)shifted - 0x4B400000 + 127) << 23);
    return select(tiny, vf{}, y * power);
}

// 1 / (1 + e^-x)
inline vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(smaller(broadcast(88.0f), -x))); }

}  // namespace gdn
