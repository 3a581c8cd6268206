// What kernels.cpp and stream.cpp begin with. The headers are the chapters of one translation unit, in the order of what they
// use.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "layout.h"

namespace {

#include "vectors.h"
#include "memory.h"
#include "scales.h"
#include "threads.h"
#include "decode.h"
#include "linear_avx2.h"

}  // namespace

#define JOIN(LEVEL, CODES) kernels_##LEVEL##_##CODES
#define NAME(LEVEL, CODES) JOIN(LEVEL, CODES)
extern const Kernels NAME(LEVEL, CODES);
