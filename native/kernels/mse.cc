// SPDX-License-Identifier: Apache-2.0
// The mean squared error of two arrays of one shape, each of float or bfloat16, and its gradient.
#include <algorithm>
#include <vector>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace mse_loops {

CLONES float sum_of_squares(const float* x, const float* t, std::size_t count) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) total += (x[i] - t[i]) * (x[i] - t[i]);
  return total;
}

CLONES void gradient(const float* x, const float* t, float factor, float* dx, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) dx[i] = (x[i] - t[i]) * factor;
}

}  // namespace mse_loops

namespace {

constexpr std::size_t kPiece = 512;  // elements whose squares are added up in float; all else in double

// Call body(number, offset, count) for every piece of `size` elements.
template <class Body>
void for_pieces(std::size_t size, const Body& body) {
  parallel_for((size + kPiece - 1) / kPiece, 2 * kPiece, [&](std::size_t begin, std::size_t end) {
    for (std::size_t piece = begin; piece < end; ++piece)
      body(piece, piece * kPiece, std::min(kPiece, size - piece * kPiece));
  });
}

const Registration loss("mse_loss", [](const Call& call) -> Step {
  if (!call.are_operands(2, 1) || !call.has_numbers({}) || !call.outputs[0].is_floats()) return {};
  const View &x = call.inputs[0], &t = call.inputs[1];
  if (x.shape != t.shape || x.size() == 0 || call.outputs[0].size() != 1) return {};
  return [size = x.size(), x = x.operand(), t = t.operand(), out = call.outputs[0].floats()] {
    std::vector<double> sums((size + kPiece - 1) / kPiece);
    for_pieces(size, [&](std::size_t piece, std::size_t offset, std::size_t count) {
      float of_x[kPiece], of_t[kPiece];
      sums[piece] = double(mse_loops::sum_of_squares(x.read(offset, count, of_x), t.read(offset, count, of_t), count));
    });
    double total = 0;  // in their order, so that the threads change nothing
    for (const double sum : sums) total += sum;
    *out = float(total / double(size));
    return true;
  };
});

const Registration backward("mse_loss_backward", [](const Call& call) -> Step {
  if (!call.are_operands(3, 1) || !call.has_numbers({}) || !call.inputs[0].is_floats()) return {};
  const View &x = call.inputs[1], &t = call.inputs[2], &dx = call.outputs[0];
  if (x.shape != t.shape || dx.shape != x.shape || x.size() == 0 || call.inputs[0].size() != 1) return {};
  return [size = x.size(), dy = call.inputs[0].floats(), x = x.operand(), t = t.operand(), dx = dx.operand()] {
    const auto factor = float(double(*dy) * (2 / double(size)));
    for_pieces(size, [&](std::size_t, std::size_t offset, std::size_t count) {
      float of_x[kPiece], of_t[kPiece], of_dx[kPiece];
      float* const to = dx.target(offset, of_dx);
      mse_loops::gradient(x.read(offset, count, of_x), t.read(offset, count, of_t), factor, to, count);
      dx.write(offset, count, to);
    });
    return true;
  };
});

}  // namespace
}  // namespace singa_lite
