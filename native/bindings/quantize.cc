// SPDX-License-Identifier: Apache-2.0
// Python's view of kernels/quantize.h. No kernels of a backend: they take arrays of the host, and at once.
#include "kernels/quantize.h"

#include <optional>

#include "bindings/arrays.h"
#include "bindings/families.h"

namespace singa_lite {
namespace {

using namespace pybind11::literals;
using Word = std::int32_t;

std::size_t words_for(std::size_t count, int bits) { return (count * std::size_t(bits) + 31) / 32; }

bool is_known(int bits) { return bits == 1 || bits == 2; }

// Nothing if the arrays are not for it: then nothing has changed.
std::optional<bool> run_quantize(const py::handle& gradient_, const py::handle& residual_, const py::handle& codes_,
                                 int bits, float threshold) {
  const In gradient(gradient_);
  const Out residual(residual_);
  const Array<Word> codes(codes_);
  if (!all(gradient, residual, codes) || !is_known(bits)) return {};
  if (residual.size != gradient.size || codes.size != words_for(gradient.size, bits)) return {};
  GilRelease release;
  return quantize(bits, threshold, gradient.data(), residual.data(), gradient.size,
                  reinterpret_cast<std::uint8_t*>(codes.data()));
}

bool run_dequantize(const py::handle& codes_, const py::handle& values_, int bits, float threshold, bool adds) {
  const Array<const Word> codes(codes_);
  const Out values(values_);
  if (!all(codes, values) || !is_known(bits) || codes.size != words_for(values.size, bits)) return false;
  GilRelease release;
  dequantize(bits, threshold, adds, reinterpret_cast<const std::uint8_t*>(codes.data()), values.data(), values.size);
  return true;
}

}  // namespace

void bind_quantize(py::module_& m) {
  m.def("quantize", &run_quantize, "gradient"_a, "residual"_a, "codes"_a, "bits"_a, "threshold"_a,
        "Whether all sums are finite and codes were made; None if the arrays are not for compiled code.");
  m.def("dequantize", &run_dequantize, "codes"_a, "values"_a, "bits"_a, "threshold"_a, "adds"_a,
        "Whether the values were written or added; False if the arrays are not for compiled code.");
}

}  // namespace singa_lite
