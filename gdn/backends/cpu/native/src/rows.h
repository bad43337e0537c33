// Rows of tensors of any float type and stride, index tensors, scratch memory and threads.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "abi.h"
#include "simd.h"

namespace gdn {

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Calls body with a null pointer of the element type.
template <class F>
inline auto with_type(int64_t dtype, F &&body) {
    switch (dtype) {
        case F16: return body((f16 *)nullptr);
        case BF16: return body((bf16 *)nullptr);
        default: return body((float *)nullptr);
    }
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline float to_float(f16 x) { return half_to_float(x.bits); }

inline void from_float(float *p, float x) { *p = x; }
inline void from_float(bf16 *p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    p->bits = x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void from_float(f16 *p, float x) { p->bits = float_to_half(x); }

template <class T>
inline void load_row(const T *source, int64_t stride, int64_t n, float *target) {
    if (stride == 1) {
        int64_t i = 0;
        for (; i + W <= n; i += W) store(target + i, load(source + i));
        for (; i < n; i++) target[i] = to_float(source[i]);
    } else {
        for (int64_t i = 0; i < n; i++) target[i] = to_float(source[i * stride]);
    }
}

template <class T>
inline void store_row(T *target, int64_t stride, int64_t n, const float *source) {
    if (stride == 1) {
        int64_t i = 0;
        for (; i + W <= n; i += W) store(target + i, load(source + i));
        for (; i < n; i++) from_float(target + i, source[i]);
    } else {
        for (int64_t i = 0; i < n; i++) from_float(target + i * stride, source[i]);
    }
}

// n elements from element `offset` on, as fp32.
inline void load_row(int64_t dtype, const void *base, int64_t offset, int64_t stride, int64_t n, float *target) {
    with_type(dtype, [&](auto *type) { load_row((decltype(type))base + offset, stride, n, target); });
}

inline void store_row(int64_t dtype, void *base, int64_t offset, int64_t stride, int64_t n, const float *source) {
    with_type(dtype, [&](auto *type) { store_row((decltype(type))base + offset, stride, n, source); });
}

inline int64_t dtype_bytes(int64_t dtype) { return dtype == F32 || dtype == I32 ? 4 : dtype == I64 ? 8 : 2; }

inline void zero_row(int64_t dtype, void *base, int64_t offset, int64_t n) {
    int64_t bytes = dtype_bytes(dtype);
    std::memset((char *)base + offset * bytes, 0, n * bytes);
}

inline int64_t index_at(const View &view, const void *base, int64_t i, int64_t j = 0) {
    int64_t at = i * view.stride[0] + j * view.stride[1];
    return view.dtype == I64 ? ((const int64_t *)base)[at] : ((const int32_t *)base)[at];
}

// The slot of a request, or -1 where it names none.
inline int64_t slot_at(const View &view, const void *base, int64_t i, int64_t slots) {
    int64_t slot = index_at(view, base, i);
    return slot >= 0 && slot < slots ? slot : -1;
}

// Whether the boundaries of all requests ascend within [0, tokens].
inline bool offsets_ascend(const View &view, const void *base, int64_t requests, int64_t tokens) {
    int64_t last = 0;
    for (int64_t i = 0; i <= requests; i++) {
        int64_t next = index_at(view, base, i);
        if (next < last || next > tokens) return false;
        last = next;
    }
    return true;
}

// Zeroes the rows of a contiguous output that lie in no real request. `real(i)` tells whether request i has a slot.
template <class F>
inline void zero_other_rows(
    const View &offsets, const void *base, int64_t requests, int64_t tokens, int64_t dtype, void *out, int64_t columns,
    F &&real) {
    int64_t at = 0;
    for (int64_t i = 0; i < requests; i++) {
        int64_t begin = index_at(offsets, base, i), end = index_at(offsets, base, i + 1);
        if (!real(i) || begin == end) continue;
        if (at < begin) zero_row(dtype, out, at * columns, (begin - at) * columns);
        at = end;
    }
    if (at < tokens) zero_row(dtype, out, at * columns, (tokens - at) * columns);
}

// Memory of one thread, kept between calls and aligned to cache lines. One user at a time.
class Scratch {
   public:
    static Scratch &of_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }

    // Starts anew with room for `bytes`.
    void open(int64_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        std::free(data_);
        size_ = round_up(bytes, 4096);
        data_ = (char *)std::aligned_alloc(64, size_);
        if (!data_) {
            size_ = 0;
            throw std::bad_alloc();
        }
    }

    template <class T>
    T *take(int64_t count) {
        T *part = (T *)(data_ + used_);
        used_ += round_up(count * int64_t(sizeof(T)), 64);
        if (used_ > size_) std::abort();
        return part;
    }

    ~Scratch() { std::free(data_); }

   private:
    char *data_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

// Bytes that one `take` of `count` elements uses.
template <class T>
inline int64_t room(int64_t count) {
    return round_up(count * int64_t(sizeof(T)), 64);
}

// Threads that work of this size is worth: a parallel region costs about 10 us.
inline int64_t worth(int64_t threads, int64_t work, int64_t unit) {
    return std::max<int64_t>(1, std::min(threads, work / unit));
}

// While it lives, this thread takes subnormal numbers for 0: states that decay through them would slow it a hundredfold.
class FlushSubnormals {
   public:
#if defined(__x86_64__)
    FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before_); }

   private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushSubnormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        __asm__ volatile("msr fpcr, %0" : : "r"(before_ | uint64_t(1) << 24));
    }
    ~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

   private:
    uint64_t before_;
#else
    FlushSubnormals() {}
#endif
   public:
    FlushSubnormals(const FlushSubnormals &) = delete;
};

// body(first, last) over contiguous shares of the items.
template <class F>
inline void parallel(int64_t threads, int64_t items, F &&body) {
    threads = std::min(threads, items);
    if (threads <= 1 || omp_in_parallel()) {
        FlushSubnormals flush;
        if (items > 0) body(int64_t(0), items);
        return;
    }
#pragma omp parallel num_threads(int(threads))
    {
        FlushSubnormals flush;
        int64_t count = omp_get_num_threads(), mine = omp_get_thread_num();
        int64_t first = items * mine / count, last = items * (mine + 1) / count;
        if (first < last) body(first, last);
    }
}

}  // namespace gdn
