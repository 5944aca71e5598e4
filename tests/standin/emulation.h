// SPDX-License-Identifier: Apache-2.0
// What a CUDA kernel needs to run on the host, for tests: its blocks one after the other, the threads of a block as
// fibers that change places at barriers and warp shuffles. A kernel's results may not depend on the order of threads
// and blocks, so every other launch takes them backwards. Included before a kernel's source.

#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

namespace emulation {

struct Place {
  unsigned x = 0, y = 0, z = 0;
};
struct Barrier {
  unsigned arrived = 0, passed = 0;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool is_done = false;
  unsigned shuffles = 0;
};

inline Place thread, block, threads, blocks;
inline std::vector<Fiber> fibers(1024);
inline Barrier whole_block, warps[32];
inline unsigned long long slots[2][1024];  // what shuffles pass on, by turns, so that one barrier is enough
inline ucontext_t scheduler;
inline bool moved;  // whether any fiber got on since all were asked
inline void (*body)(void**);
inline void** arguments;
inline std::mutex one_at_a_time;  // kernels of several streams

inline void wait_at(Barrier& barrier, unsigned members) {
  const unsigned now = barrier.passed;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.passed;
    moved = true;
    return;
  }
  const Place me = thread;
  while (barrier.passed == now) swapcontext(&fibers[me.x].context, &scheduler);
}

inline void run_fiber() {
  body(arguments);
  fibers[thread.x].is_done = true;
  moved = true;
}

// false if threads wait for others that never come
inline bool run_block(bool backwards) {
  for (unsigned i = 0; i < threads.x; ++i) {
    Fiber& fiber = fibers[i];
    fiber.is_done = false;
    fiber.shuffles = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
  whole_block = Barrier();
  for (Barrier& warp : warps) warp = Barrier();
  // a warp runs as far as it can before the next one does, so that one which may not run ahead is seen
  const unsigned num_warps = (threads.x + 31) / 32;
  for (unsigned left = threads.x; left;) {
    bool any_moved = false;
    left = 0;
    for (unsigned w = 0; w < num_warps; ++w) {
      const unsigned begin = 32 * (backwards ? num_warps - 1 - w : w), end = begin + 32 < threads.x ? begin + 32 : threads.x;
      unsigned here;
      do {
        moved = false;
        here = 0;
        for (unsigned i = begin; i < end; ++i) {
          const unsigned which = backwards ? begin + end - 1 - i : i;
          if (fibers[which].is_done) continue;
          thread.x = which;
          swapcontext(&scheduler, &fibers[which].context);
          here += !fibers[which].is_done;
        }
        any_moved |= moved;
      } while (moved && here);
      left += here;
    }
    if (left && !any_moved) return false;
  }
  return true;
}

template <class V> V shuffle(V value, unsigned from_lane) {
  static_assert(sizeof(V) <= 8, "a shuffle passes at most 8 bytes");
  const unsigned warp = thread.x / 32, turn = fibers[thread.x].shuffles++ % 2;
  const unsigned me = thread.x, members = threads.x - 32 * warp < 32 ? threads.x - 32 * warp : 32;
  memcpy(&slots[turn][me], &value, sizeof(V));
  wait_at(warps[warp], members);
  if (from_lane < members) memcpy(&value, &slots[turn][32 * warp + from_lane], sizeof(V));
  return value;
}

template <class... Types, size_t... places>
void call(void (*kernel)(Types...), void** given, std::index_sequence<places...>) {
  kernel(*static_cast<std::remove_reference_t<Types>*>(given[places])...);
}

// What a kernel takes: for each argument pointer, int, float or struct, and its bytes.
template <class... Types> std::string form_of(void (*)(Types...)) {
  std::string form;
  ((form += std::is_pointer_v<Types> ? "p" : std::is_integral_v<Types> ? "i" : std::is_floating_point_v<Types> ? "f" : "s",
    form += std::to_string(sizeof(Types)) + " "), ...);
  return form;
}

inline int launch(void (*run)(void**), unsigned num_blocks, unsigned num_threads, void** given) {
  static unsigned launches = 0;
  const std::lock_guard lock(one_at_a_time);
  if (num_threads == 0 || num_threads > 1024 || num_blocks == 0) return 2;
  body = run;
  arguments = given;
  threads = Place{num_threads, 1, 1};
  blocks = Place{num_blocks, 1, 1};
  const bool backwards = launches++ % 2;
  for (unsigned i = 0; i < num_blocks; ++i) {
    block = Place{backwards ? num_blocks - 1 - i : i, 0, 0};
    if (!run_block(backwards)) return 1;
  }
  return 0;
}

}  // namespace emulation

#define EMULATE(kernel)                                                                                       \
  static void run_##kernel(void** given) {                                                                    \
    [&]<class... Types>(void (*k)(Types...)) {                                                                \
      emulation::call(k, given, std::index_sequence_for<Types...>());                                         \
    }(kernel);                                                                                                \
  }                                                                                                           \
  extern "C" int launch_##kernel(unsigned num_blocks, unsigned num_threads, void** given) {                   \
    return emulation::launch(run_##kernel, num_blocks, num_threads, given);                                   \
  }                                                                                                           \
  extern "C" const char* form_##kernel() {                                                                    \
    static const std::string form = emulation::form_of(kernel);                                               \
    return form.c_str();                                                                                      \
  }

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define blockDim emulation::threads
#define gridDim emulation::blocks

inline void __syncthreads() { emulation::wait_at(emulation::whole_block, emulation::threads.x); }
inline void __threadfence() {}
template <class V> V __shfl_xor_sync(unsigned, V value, int lanes) {
  return emulation::shuffle(value, (emulation::thread.x % 32) ^ lanes);
}
template <class V> V __shfl_up_sync(unsigned, V value, unsigned lanes) {
  const unsigned lane = emulation::thread.x % 32;
  return emulation::shuffle(value, lane >= lanes ? lane - lanes : lane);
}
template <class V> V __shfl_down_sync(unsigned, V value, unsigned lanes) {
  const unsigned lane = emulation::thread.x % 32;
  return emulation::shuffle(value, lane + lanes < 32 ? lane + lanes : lane);
}
template <class V, class W> V atomicAdd(V* place, W value) {
  const V before = *place;
  *place += value;
  return before;
}
inline unsigned atomicInc(unsigned* place, unsigned last) {
  const unsigned before = *place;
  *place = before >= last ? 0 : before + 1;
  return before;
}
template <class To, class From> To same_bits(From value) {
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}
inline unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline long long __double_as_longlong(double value) { return same_bits<long long>(value); }
inline float half_to_float(unsigned short bits) { return same_bits<_Float16>(bits); }
inline unsigned short float_to_half(float value) { return same_bits<unsigned short>(static_cast<_Float16>(value)); }
inline unsigned short double_to_half(double value) { return same_bits<unsigned short>(static_cast<_Float16>(value)); }
