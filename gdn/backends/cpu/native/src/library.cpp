// The native kernels of gdn's cpu backend: a plain C interface, no Python and no torch. Compiled once for each path of
// instructions; `build.py` chooses flags, `structures.py` mirrors the arguments.
#include "conv.h"
#include "decode.h"
#include "extend.h"
#include "gates.h"
#include "replay.h"
#include "verify.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define GDN_EXPORT extern "C" __attribute__((visibility("default")))

// 0 if this process may use the path's instructions: Linux hands out AMX tiles only to processes that ask.
GDN_EXPORT int gdn_permit() {
#if defined(__AMX_BF16__) && defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA);
#else
    return 0;
#endif
}

#define GDN_OPERATION(name, Plan, Call)                                                                      \
    GDN_EXPORT int gdn_##name(const gdn::Plan *plan, const gdn::Call *call) { return gdn::name(*plan, *call); } \
    GDN_EXPORT int64_t gdn_##name##_plan_bytes() { return sizeof(gdn::Plan); }                                \
    GDN_EXPORT int64_t gdn_##name##_call_bytes() { return sizeof(gdn::Call); }

GDN_OPERATION(decode, DecodePlan, DecodeCall)
GDN_OPERATION(replay, DecodePlan, DecodeCall)
GDN_OPERATION(verify, VerifyPlan, VerifyCall)
GDN_OPERATION(extend, ExtendPlan, ExtendCall)
GDN_OPERATION(gating, GatingPlan, GatingCall)
GDN_OPERATION(split, SplitPlan, SplitCall)
GDN_OPERATION(conv_extend, ConvExtendPlan, ConvExtendCall)
GDN_OPERATION(conv_update, ConvUpdatePlan, ConvUpdateCall)
