// The common beginning of kernels.cpp and stream.cpp. The headers are parts of one translation unit; each uses those before
// it.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "layout.h"

namespace {

#include "vectors.h"
#include "wide.h"
#include "memory.h"
#include "scales.h"
#include "threads.h"
#include "decode.h"
#include "linear.h"

}  // namespace

#define JOIN(LEVEL, CODES) kernels_##LEVEL##_##CODES
#define NAME(LEVEL, CODES) JOIN(LEVEL, CODES)
extern const Kernels NAME(LEVEL, CODES);
