// SPDX-License-Identifier: Apache-2.0
// Stacks of recurrent layers by cuDNN, through the calls that exist since its version 8.
#pragma once

#include <cstdint>

#include "cuda/cudnn.h"

namespace singa_lite::cudnn {

// cuDNN's numbers.
enum class RnnMode : int { kRelu = 0, kTanh = 1, kLstm = 2, kGru = 3 };
enum class RnnAlgorithm : int { kStandard = 0 };
enum class BiasMode : int { kNone = 0, kDouble = 2 };
enum class Directions : int { kOne = 0, kBoth = 1 };
enum class InputMode : int { kLinear = 0 };
enum class SequenceLayout : int { kUnpacked = 0, kPacked = 1 };  // both with the steps outermost
enum class PaddedIo : std::uint32_t { kOff = 0, kOn = 1 };
enum class ForwardMode : int { kInference = 0, kTraining = 1 };
enum class WeightGradient : int { kAdd = 0 };

using SetTensorNd = Status(Opaque, DType, int num_axes, const int* shape, const int* strides);
using SetDropout = Status(Opaque, Opaque handle, float ratio, void* states, std::size_t, unsigned long long seed);
using SetRnn = Status(Opaque, RnnAlgorithm, RnnMode, BiasMode, Directions, InputMode, DType data, DType compute, Math,
                      std::int32_t input_size, std::int32_t hidden_size, std::int32_t projected_size,
                      std::int32_t num_layers, Opaque dropout, PaddedIo);
using SetRnnData = Status(Opaque, DType, SequenceLayout, int steps, int batch, int features, const int* lengths,
                          void* padding);
using WeightSize = Status(Opaque handle, Opaque rnn, std::size_t* bytes);
using WeightAddress = Status(Opaque handle, Opaque rnn, std::int32_t cell, std::size_t bytes, const void* weights,
                           std::int32_t number, Opaque matrix, void** matrix_data, Opaque bias, void** bias_data);
using TemporarySizes = Status(Opaque handle, Opaque rnn, ForwardMode, Opaque x, std::size_t* workspace,
                              std::size_t* reserve);
using RnnForward = Status(Opaque handle, Opaque rnn, ForwardMode, const std::int32_t* lengths, Opaque x,
                          const void* x_data, Opaque y, void* y_data, Opaque h, const void* h0, void* hy, Opaque c,
                          const void* c0, void* cy, std::size_t, const void* weights, std::size_t, void* workspace,
                          std::size_t, void* reserve);
using RnnBackwardData = Status(Opaque handle, Opaque rnn, const std::int32_t* lengths, Opaque y, const void* y_data,
                               const void* dy, Opaque x, void* dx, Opaque h, const void* h0, const void* dhy, void* dh0,
                               Opaque c, const void* c0, const void* dcy, void* dc0, std::size_t, const void* weights,
                               std::size_t, void* workspace, std::size_t, void* reserve);
using RnnBackwardWeights = Status(Opaque handle, Opaque rnn, WeightGradient, const std::int32_t* lengths, Opaque x,
                                  const void* x_data, Opaque h, const void* h0, Opaque y, const void* y_data,
                                  std::size_t, void* dweights, std::size_t, void* workspace, std::size_t,
                                  void* reserve);

struct RecurrentCalls {
  explicit RecurrentCalls(const Cudnn& cudnn);

  Create *create_rnn, *create_data, *create_dropout;
  Destroy *destroy_rnn, *destroy_data, *destroy_dropout;
  SetTensorNd* set_tensor_nd;
  SetDropout* set_dropout;
  SetRnn* set_rnn;
  SetRnnData* set_data;
  WeightSize* weight_size;
  WeightAddress* weight_address;
  TemporarySizes* temporary_sizes;
  RnnForward* forward;
  RnnBackwardData* backward_data;
  RnnBackwardWeights* backward_weights;
};

// x (steps, batch, input), y (steps, batch, directions * hidden), states (layers * directions, batch, hidden).
struct RnnConfig {
  DType dtype;
  RnnMode mode;
  int input_size, hidden_size, num_layers;
  bool bidirectional, bias;
  int steps, batch;
  // Where each sequence ends, at least one of them after the last step; empty: all do. cuDNN reads them here, on the
  // host, and passes them to its kernels by value, so a captured call repeats them.
  std::vector<int> lengths;

  int num_cells() const { return num_layers * (bidirectional ? 2 : 1); }
  std::string text() const;
};

// So many elements of the packed weights (singa_lite/backend/recurrent.py) and cuDNN's offset of them.
struct Piece {
  std::size_t ours, theirs, count;
};

// A stack with its descriptors. Sums are float32, or float64 for float64. All data are on the handle's device, and
// row-major. No dropout: that falls between calls.
class Recurrent {
 public:
  Recurrent(std::shared_ptr<Handle> handle, RnnConfig config, bool allow_tf32);

  // Where cuDNN's order of weights differs from ours; empty if it does not.
  const std::vector<Piece>& pieces() const { return pieces_; }
  std::size_t weight_bytes() const { return weight_bytes_; }  // in cuDNN's order
  std::size_t reserve_bytes() const { return reserve_bytes_; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }

  // Starts on `stream`. `reserve`: null if no gradient will be computed; c0 and cy: null but for lstm.
  void forward(Opaque stream, const void* x, const void* weights, const void* h0, const void* c0, void* y, void* hy,
               void* cy, void* workspace, void* reserve);
  // Likewise; writes all that begins with d and comes after y, adds to dweights, and uses the reserve up.
  void backward(Opaque stream, const void* dy, const void* dhy, const void* dcy, const void* x, const void* weights,
                const void* h0, const void* c0, const void* y, void* dx, void* dweights, void* dh0, void* dc0,
                void* workspace, void* reserve);

 private:
  void check(Status status, const char* call) const;
  void find_offsets();

  std::shared_ptr<Handle> handle_;
  const Cudnn& cudnn_;
  const RecurrentCalls& calls_;
  RnnConfig config_;
  Object rnn_, dropout_, x_, y_;
  Tensor h_;
  Opaque c_ = nullptr;  // h_ for lstm
  std::vector<Piece> pieces_;
  std::size_t weight_bytes_ = 0, reserve_bytes_ = 0, workspace_bytes_ = 0, inference_bytes_ = 0;
};

}  // namespace singa_lite::cudnn
