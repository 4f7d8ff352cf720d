// CUDA on the CPU, for tests: blocks one after another, a fiber per thread.
//
// Blocks and threads run in ascending or in descending order, and each warp as far as it gets without
// the others: what depends on an order that CUDA does not promise shows as a difference.
//
// Barriers and warp intrinsics are rendezvous. What CUDA leaves undefined ends the process with a
// message: a collective that some lane of its mask does not reach, lanes that meet in different
// collectives, a barrier that not all threads reach.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
using std::isfinite;
using std::isnan;

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)

struct Index { int x = 0, y = 0, z = 0; };

namespace shim {

constexpr int WARP = 32;
constexpr size_t STACK = 256 * 1024;

struct Warp {
  uint64_t slot[WARP];
  int kind[WARP];
  int arrived = 0, live = 0;
  unsigned turn = 0;
};

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf at;          // where it goes on
  bool begun = false;
  char* stack = nullptr;
  void* fake = nullptr;
  Index index;
  bool done = true;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline ucontext_t home;
inline jmp_buf home_at;
inline void* home_fake = nullptr;
inline const void* home_bottom = nullptr;
inline size_t home_size = 0;
inline Fiber* current = nullptr;
inline Index block_index, block_dim, grid_dim;
inline int live = 0, waiting = 0;
inline unsigned turn = 0;
inline uint64_t events = 0;  // arrivals at a rendezvous, and returns
// the kernel: a function, and its arguments
inline void (*body)(void*) = nullptr;
inline void* given = nullptr;
inline bool descending = false;

// swapcontext asks the kernel for the signal mask, twice a meeting; setjmp does not. The sanitizer
// knows of swapcontext alone.
#if defined(__SANITIZE_ADDRESS__)
#define SWITCH(from, to, swap) swap
#define BEGIN(from, swap) swap
#else
#define SWITCH(from, to, swap) if (!_setjmp(from)) _longjmp(to, 1)
#define BEGIN(from, swap) if (!_setjmp(from)) swap
#endif

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "shim: %s (block %d, thread %d)\n", what, block_index.x,
               current ? current->index.x : -1);
  std::abort();
}

inline void leave(bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &current->fake, home_bottom, home_size);
#endif
  SWITCH(current->at, home_at, swapcontext(&current->context, &home));
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(current->fake, nullptr, nullptr);
#endif
}

inline void enter(Fiber& fiber) {
  current = &fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&home_fake, fiber.stack, STACK);
#endif
  if (fiber.begun) {
    SWITCH(home_at, fiber.at, swapcontext(&home, &fiber.context));
  } else {
    fiber.begun = true;
    BEGIN(home_at, swapcontext(&home, &fiber.context));
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(home_fake, nullptr, nullptr);
#endif
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &home_bottom, &home_size);
#endif
  body(given);
  current->done = true;
  Warp& warp = warps[current->index.x / WARP];
  --warp.live;
  --live;
  ++events;
  if (warp.arrived) die("a thread returns while others of its warp are in a collective");
  if (waiting) die("a thread returns while others wait at __syncthreads");
  leave(true);
}

inline void start(Fiber& fiber, int number) {
  if (!fiber.stack) fiber.stack = static_cast<char*>(std::malloc(STACK));
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  fiber.index.x = number;
  fiber.done = fiber.begun = false;
  fiber.fake = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

// as far as the warp gets without the others: what is not kept apart by a barrier meets
inline void run_warp(int number, int threads) {
  const int first = number * WARP, lanes = threads - first < WARP ? threads - first : WARP;
  for (uint64_t before = events - 1; before != events;) {
    before = events;
    for (int k = 0; k < lanes; ++k) {
      Fiber& fiber = fibers[first + (descending ? lanes - 1 - k : k)];
      if (!fiber.done) enter(fiber);
    }
  }
}

inline void run_block(int threads) {
  live = threads;
  waiting = 0;
  warps.assign((threads + WARP - 1) / WARP, Warp());
  for (int i = 0; i < threads; ++i) {
    ++warps[i / WARP].live;
    start(fibers[i], i);
  }
  const int count = (int)warps.size();
  while (live) {
    const uint64_t before = events;
    for (int k = 0; k < count; ++k) run_warp(descending ? count - 1 - k : k, threads);
    if (before == events) die("deadlock: threads wait in different places");
  }
  current = nullptr;
}

inline void launch(int grid, int threads, void (*kernel)(void*), void* arguments) {
  if ((int)fibers.size() < threads) fibers.resize(threads);
  body = kernel;
  given = arguments;
  block_dim.x = threads;
  grid_dim.x = grid;
  block_dim.y = block_dim.z = grid_dim.y = grid_dim.z = 1;
  for (int b = 0; b < grid; ++b) {
    block_index.x = descending ? grid - 1 - b : b;
    run_block(threads);
  }
}

// all live lanes of the warp meet twice: to give, and after all have taken
inline void meet(Warp& w) {
  unsigned own = w.turn;
  ++events;
  if (++w.arrived == w.live) {
    w.arrived = 0;
    ++w.turn;
    return;
  }
  while (w.turn == own) leave();
}

template <class Take> auto collective(unsigned mask, int kind, uint64_t value, Take take) {
  Warp& w = warps[current->index.x / WARP];
  int lane = current->index.x % WARP;
  if (mask != 0xffffffffu || w.live != WARP) die("a collective without all lanes of its warp");
  w.slot[lane] = value;
  w.kind[lane] = kind;
  meet(w);
  for (int i = 0; i < WARP; ++i)
    if (w.kind[i] != kind) die("lanes of one warp meet in different collectives");
  auto result = take(w.slot, lane);
  meet(w);
  return result;
}

template <class T> uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof(T));
  return bits;
}
template <class T> T unpack(uint64_t bits) {
  T v;
  std::memcpy(&v, &bits, sizeof(T));
  return v;
}

}  // namespace shim

#define threadIdx (shim::current->index)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_dim)
#define gridDim (shim::grid_dim)

inline void __syncthreads() {
  unsigned own = shim::turn;
  ++shim::events;
  if (++shim::waiting == shim::live) {
    shim::waiting = 0;
    ++shim::turn;
    return;
  }
  while (shim::turn == own) shim::leave();
}
static int __syncthreads_or(int predicate) {
  __shared__ int any;  // 0 between calls
  if (predicate) any = 1;
  __syncthreads();
  const int found = any;
  __syncthreads();
  any = 0;
  __syncthreads();
  return found;
}
inline void __threadfence() {}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  shim::collective(mask, 1, 0, [](uint64_t*, int) { return 0; });
}
template <class T> T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  return shim::collective(mask, 2, shim::pack(v), [=](uint64_t* s, int lane) {
    return shim::unpack<T>(s[lane / width * width + from % width]);
  });
}
template <class T> T __shfl_down_sync(unsigned mask, T v, int by, int width = 32) {
  return shim::collective(mask, 3, shim::pack(v), [=](uint64_t* s, int lane) {
    return shim::unpack<T>(s[lane % width + by < width ? lane + by : lane]);
  });
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int by, int width = 32) {
  return shim::collective(mask, 4, shim::pack(v), [=](uint64_t* s, int lane) {
    return shim::unpack<T>(s[lane % width >= by ? lane - by : lane]);
  });
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32) {
  return shim::collective(mask, 5, shim::pack(v), [=](uint64_t* s, int lane) {
    int other = lane ^ by;
    return shim::unpack<T>(s[other / width == lane / width ? other : lane]);
  });
}
inline unsigned __ballot_sync(unsigned mask, int v) {
  return shim::collective(mask, 6, v != 0, [](uint64_t* s, int) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (unsigned)(s[i] != 0) << i;
    return bits;
  });
}
inline int __all_sync(unsigned mask, int v) { return __ballot_sync(mask, v) == 0xffffffffu; }
inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
template <class T> T atomicAdd(T* p, T v) { T old = *p; *p += v; return old; }
template <class T> T atomicOr(T* p, T v) { T old = *p; *p |= v; return old; }
template <class T> T atomicMax(T* p, T v) { T old = *p; if (v > old) *p = v; return old; }
template <class T> T atomicMin(T* p, T v) { T old = *p; if (v < old) *p = v; return old; }
inline unsigned __float2uint_rz(float x) {
  return x > 0.0f ? x < 4294967296.0f ? (unsigned)x : 0xffffffffu : 0u;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __float_as_int(float x) { return shim::unpack<int>(shim::pack(x)); }
inline float __int_as_float(int x) { return shim::unpack<float>(shim::pack(x)); }
inline long long __double_as_longlong(double x) { return shim::unpack<long long>(shim::pack(x)); }
inline double __longlong_as_double(long long x) { return shim::unpack<double>(shim::pack(x)); }
