// SPDX-License-Identifier: Apache-2.0
// What a CUDA kernel needs to run on the host, for tests: its blocks one after the other, the threads of a block as
// fibers that change places at barriers and warp shuffles (emulation.cc). A kernel's results may not depend on the order
// of threads and blocks, so every other launch takes them backwards. Included before a kernel's source, and light, as
// hundreds of sources are compiled with it.

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

namespace emulation {

struct Place {
  unsigned x = 0, y = 0, z = 0;
};
extern Place thread, block, threads, blocks;

// Waits until all threads of the block have come.
void wait_for_block();
// Passes `value` on to the threads of the warp; returns what the thread `from_lane` of it passes on.
unsigned long long shuffle_bits(unsigned long long value, unsigned from_lane);
// Runs a kernel: 0, 1 if threads wait for others that never come, 2 for a bad size.
int run(void (*kernel)(void**), unsigned num_blocks, unsigned num_threads, void** given, bool backwards);

template <class V> V shuffle(V value, unsigned from_lane) {
  static_assert(sizeof(V) <= 8, "a shuffle passes at most 8 bytes");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(V));
  bits = shuffle_bits(bits, from_lane);
  memcpy(&value, &bits, sizeof(V));
  return value;
}

template <class... Types, size_t... places>
void call(void (*kernel)(Types...), void** given, std::index_sequence<places...>) {
  kernel(*static_cast<std::remove_reference_t<Types>*>(given[places])...);
}

// What a kernel takes: for each argument pointer, int, float or struct, and its bytes.
template <class... Types> const char* form_of(void (*)(Types...)) {
  static char form[12 * sizeof...(Types) + 1];
  char* end = form;
  ((end += sprintf(end, "%c%d ", std::is_pointer_v<Types> ? 'p' : std::is_integral_v<Types> ? 'i'
                                 : std::is_floating_point_v<Types> ? 'f' : 's', int(sizeof(Types)))), ...);
  return form;
}

inline int launch(void (*kernel)(void**), unsigned num_blocks, unsigned num_threads, void** given) {
  static unsigned launches = 0;
  return run(kernel, num_blocks, num_threads, given, launches++ % 2);
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
    return emulation::form_of(kernel);                                                                        \
  }

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define blockDim emulation::threads
#define gridDim emulation::blocks

inline void __syncthreads() { emulation::wait_for_block(); }
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
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
inline float normcdff(float x) { return static_cast<float>(normcdf(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline long long __double_as_longlong(double value) { return same_bits<long long>(value); }
inline float half_to_float(unsigned short bits) { return same_bits<_Float16>(bits); }
inline unsigned short float_to_half(float value) { return same_bits<unsigned short>(static_cast<_Float16>(value)); }
inline unsigned short double_to_half(double value) { return same_bits<unsigned short>(static_cast<_Float16>(value)); }
