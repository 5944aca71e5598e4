// SPDX-License-Identifier: Apache-2.0
// 8-bit messages for message.py; the notes in ../cpu/quantize.py say what they are. A block of threads has a block of
// values, a thread one of them. Products are rounded before they are added (__fmul_rn), as on the CPU: the bits are equal.

const int kBlock = 256, kLanes = 32, kLargest = 127;
const float kSmallest = 1.17549435e-38f;  // 2 ** -126

// Where this thread's value, its code and its block's scale are.
struct Place {
  Int value, code, scale;
  bool is_in_row, is_here;  // of the row; of the values, too
};

__device__ inline Place find_place(Int row_size, Int num_values, Int blocks_a_row) {
  const Int row = blockIdx.x / blocks_a_row, start = blockIdx.x % blocks_a_row * kBlock;
  const Int message = row * (4 * blocks_a_row + row_size), i = start + threadIdx.x;
  const Int value = row * row_size + i;
  const bool is_in_row = i < row_size;
  return {value, message + 4 * blocks_a_row + i, message + start / kBlock * 4, is_in_row,
          is_in_row && value < num_values};
}

__device__ inline float read_scale(const Byte* at) {  // not aligned
  return __uint_as_float(at[0] | at[1] << 8 | at[2] << 16 | static_cast<unsigned>(at[3]) << 24);
}
__device__ inline void write_scale(float scale, Byte* at) {
  const unsigned bits = __float_as_uint(scale);
  for (int i = 0; i < 4; ++i) at[i] = static_cast<Byte>(bits >> 8 * i);
}

__device__ inline float scale_of_block(float value) {
  const float largest = over_block<Larger>(value < 0 ? -value : value);
  const float scale = largest / kLargest;
  if ((__float_as_uint(largest) & 0x7fffffff) >= 0x7f800000) return __uint_as_float(0x7fc00000);
  return scale < kSmallest ? 0 : scale;
}

__device__ inline float draw_of(const Number<Bits>& seed, const Number<Bits>& counter, Int block) {
  unsigned words[4];
  draw(Stream{seed, counter}, block * kLanes + threadIdx.x % kLanes, words);
  const unsigned part = threadIdx.x / kLanes, half = words[part / 2] >> part % 2 * 16 & 0xffff;
  return static_cast<float>(2 * half + 1) * 7.62939453125e-6f;  // 2 ** -17
}

__device__ inline Byte code_of(float rounded) {
  const float most = kLargest, code = rounded > most ? most : rounded < -most ? -most : rounded;
  return static_cast<Byte>(static_cast<signed char>(static_cast<int>(code)));
}

__device__ inline float decode(const Byte* messages, Int scale, Int code) {
  return __fmul_rn(read_scale(messages + scale), static_cast<float>(static_cast<signed char>(messages[code])));
}

KERNEL quantize_int8(const T* x, Byte* messages, Int row_size, Int num_values, Int blocks_a_row, Number<Bits> seed,
                     Number<Bits> counter) {
  const Place place = find_place(row_size, num_values, blocks_a_row);
  const float value = place.is_here ? static_cast<float>(widen(x[place.value])) : 0;
  const float scale = scale_of_block(value);
  if (threadIdx.x == 0) write_scale(scale, messages + place.scale);
  if (!place.is_in_row) return;
  messages[place.code] = scale > 0 ? code_of(floor(value / scale + draw_of(seed, counter, blockIdx.x))) : 0;
}

KERNEL quantize_int8_nearest(const T* x, Byte* messages, T* rest, Int row_size, Int num_values, Int blocks_a_row) {
  const Place place = find_place(row_size, num_values, blocks_a_row);
  const float value = place.is_here ? static_cast<float>(widen(x[place.value])) : 0;
  const float scale = scale_of_block(value);
  if (threadIdx.x == 0) write_scale(scale, messages + place.scale);
  if (!place.is_in_row) return;
  const Byte code = scale > 0 ? code_of(rint(value / scale)) : 0;
  messages[place.code] = code;
  if (!place.is_here) return;
  const float sent = __fmul_rn(scale, static_cast<float>(static_cast<signed char>(code)));
  rest[place.value] = narrow<T>(A(is_nan(scale) ? 0 : value - sent));
}

KERNEL dequantize_int8(const Byte* messages, T* y, Int row_size, Int num_values, Int blocks_a_row) {
  const Place place = find_place(row_size, num_values, blocks_a_row);
  if (place.is_here) y[place.value] = narrow<T>(A(decode(messages, place.scale, place.code)));
}

// The rows stand for the same values.
KERNEL mean_of_int8(const Byte* messages, T* y, Int row_size, Int num_rows, Int blocks_a_row) {
  const Place place = find_place(row_size, row_size, blocks_a_row);
  if (!place.is_here) return;
  const Int row_bytes = 4 * blocks_a_row + row_size;
  float total = decode(messages, place.scale, place.code);
  for (Int row = 1; row < num_rows; ++row) total += decode(messages + row * row_bytes, place.scale, place.code);
  y[place.value] = narrow<T>(A(total / static_cast<float>(num_rows)));
}
