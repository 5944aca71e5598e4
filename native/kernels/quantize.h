// SPDX-License-Identifier: Apache-2.0
// Gradients in 1 or 2 bits a value, after MXNet. singa_lite/kvstore/compression.py says what the bits mean; its numpy code
// is the reference and gives the same bits. `bits` is 1 or 2. Codes are bytes, the first value in the highest bits, in
// whole words: 4 * ceil(count * bits / 32) bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace singa_lite {

// residual += gradient; write the codes of what is sent, zeros after the last, and subtract that from the residual.
// False, and nothing changed, if a sum is not finite.
bool quantize(int bits, float threshold, const float* gradient, float* residual, std::size_t count,
              std::uint8_t* codes);

// values = what the codes stand for, or values += that.
void dequantize(int bits, float threshold, bool adds, const std::uint8_t* codes, float* values, std::size_t count);

}  // namespace singa_lite
