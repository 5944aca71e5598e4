// SPDX-License-Identifier: Apache-2.0
#include "cuda/rnn.h"

#include <algorithm>

namespace singa_lite::cudnn {

namespace {

const char* mode_name(RnnMode mode) {
  static constexpr const char* kNames[] = {"relu", "tanh", "lstm", "gru"};
  return kNames[int(mode)];
}

int gates_of(RnnMode mode) { return mode == RnnMode::kLstm ? 4 : mode == RnnMode::kGru ? 3 : 1; }

std::size_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace

RecurrentCalls::RecurrentCalls(const Cudnn& cudnn) {
  cudnn.load(create_rnn, "cudnnCreateRNNDescriptor");
  cudnn.load(destroy_rnn, "cudnnDestroyRNNDescriptor");
  cudnn.load(create_data, "cudnnCreateRNNDataDescriptor");
  cudnn.load(destroy_data, "cudnnDestroyRNNDataDescriptor");
  cudnn.load(create_dropout, "cudnnCreateDropoutDescriptor");
  cudnn.load(destroy_dropout, "cudnnDestroyDropoutDescriptor");
  cudnn.load(set_tensor_nd, "cudnnSetTensorNdDescriptor");
  cudnn.load(set_dropout, "cudnnSetDropoutDescriptor");
  cudnn.load(set_rnn, "cudnnSetRNNDescriptor_v8");
  cudnn.load(set_data, "cudnnSetRNNDataDescriptor");
  cudnn.load(weight_size, "cudnnGetRNNWeightSpaceSize");
  cudnn.load(weight_address, "cudnnGetRNNWeightParams");
  cudnn.load(temporary_sizes, "cudnnGetRNNTempSpaceSizes");
  cudnn.load(forward, "cudnnRNNForward");
  cudnn.load(backward_data, "cudnnRNNBackwardData_v8");
  cudnn.load(backward_weights, "cudnnRNNBackwardWeights_v8");
}

std::string RnnConfig::text() const {
  return std::string(name_of(dtype)) + ' ' + mode_name(mode) + text_of(" x", std::array{steps, batch, input_size}) +
         " hidden " + std::to_string(hidden_size) + " layers " + std::to_string(num_layers) +
         (bidirectional ? " bidirectional" : "") + (bias ? "" : " without bias") +
         (lengths.empty() ? "" : " of several lengths");
}

Recurrent::Recurrent(std::shared_ptr<Handle> handle, RnnConfig config, bool allow_tf32)
    : handle_(std::move(handle)),
      cudnn_(*handle_->cudnn),
      calls_(*cudnn_.recurrent),
      config_(std::move(config)),
      rnn_(handle_->cudnn, calls_.create_rnn, calls_.destroy_rnn),
      dropout_(handle_->cudnn, calls_.create_dropout, calls_.destroy_dropout),
      x_(handle_->cudnn, calls_.create_data, calls_.destroy_data),
      y_(handle_->cudnn, calls_.create_data, calls_.destroy_data),
      h_(*handle_) {
  const std::lock_guard lock(handle_->mutex);
  const auto& [dtype, mode, input_size, hidden_size, num_layers, bidirectional, bias, steps, batch, lengths] = config_;
  const DType compute = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  // sequences of one length need no padding, and no copies that leave it out
  const bool is_padded = !lengths.empty();
  const SequenceLayout layout = is_padded ? SequenceLayout::kUnpacked : SequenceLayout::kPacked;
  const std::vector<int> ends = is_padded ? lengths : std::vector<int>(batch, steps);
  double padding = 0;  // of 8 bytes: zero in every type
  const Opaque object = handle_->object();
  check(calls_.set_dropout(dropout_, object, 0.0f, nullptr, 0, 0), "cudnnSetDropoutDescriptor");
  // a projection to all of the hidden features stands for no projection
  check(calls_.set_rnn(rnn_, RnnAlgorithm::kStandard, mode, bias ? BiasMode::kDouble : BiasMode::kNone,
                       bidirectional ? Directions::kBoth : Directions::kOne, InputMode::kLinear, dtype, compute,
                       math_of(dtype, allow_tf32), input_size, hidden_size, hidden_size, num_layers, dropout_,
                       is_padded ? PaddedIo::kOn : PaddedIo::kOff),
        "cudnnSetRNNDescriptor_v8");
  check(calls_.set_data(x_, dtype, layout, steps, batch, input_size, ends.data(), &padding),
        "cudnnSetRNNDataDescriptor of x");
  check(calls_.set_data(y_, dtype, layout, steps, batch, hidden_size * (bidirectional ? 2 : 1), ends.data(), &padding),
        "cudnnSetRNNDataDescriptor of y");
  const int shape[] = {config_.num_cells(), batch, hidden_size}, strides[] = {batch * hidden_size, hidden_size, 1};
  check(calls_.set_tensor_nd(h_, dtype, 3, shape, strides), "cudnnSetTensorNdDescriptor");
  if (mode == RnnMode::kLstm) c_ = h_;
  check(calls_.weight_size(object, rnn_, &weight_bytes_), "cudnnGetRNNWeightSpaceSize");
  std::size_t none = 0;
  check(calls_.temporary_sizes(object, rnn_, ForwardMode::kInference, x_, &inference_bytes_, &none),
        "cudnnGetRNNTempSpaceSizes");
  check(calls_.temporary_sizes(object, rnn_, ForwardMode::kTraining, x_, &workspace_bytes_, &reserve_bytes_),
        "cudnnGetRNNTempSpaceSizes");
  workspace_bytes_ = std::max(workspace_bytes_, inference_bytes_);
  find_offsets();
}

void Recurrent::check(Status status, const char* call) const {
  if (status != kSuccess) cudnn_.check(status, std::string(call) + " for " + config_.text());
}

// Our order is what cuDNN 9 is known to use, but it promises none: it only returns the address of each matrix and bias.
void Recurrent::find_offsets() {
  const Tensor matrix(*handle_), bias(*handle_);
  const std::size_t size = size_of(config_.dtype), hidden = config_.hidden_size;
  const int gates = gates_of(config_.mode), directions = config_.bidirectional ? 2 : 1;
  char* const base = reinterpret_cast<char*>(std::uintptr_t(1) << 20);  // never read, and not null, which means absent
  std::vector<Piece> biases;
  std::size_t ours = 0;
  const auto add = [&](std::vector<Piece>& to, void* address, std::size_t count) {
    if (address == nullptr) throw CudnnError("cudnnGetRNNWeightParams returned no address for the weights of " + config_.text());
    to.push_back({0, std::size_t(static_cast<char*>(address) - base) / size, count});
  };
  for (int cell = 0; cell < config_.num_cells(); ++cell)
    for (int number = 0; number < 2 * gates; ++number) {
      void *of_matrix = nullptr, *of_bias = nullptr;
      check(calls_.weight_address(handle_->object(), rnn_, cell, weight_bytes_, base, number, matrix, &of_matrix, bias,
                                &of_bias),
            "cudnnGetRNNWeightParams");
      const std::size_t columns = number >= gates        ? hidden
                                  : cell / directions == 0 ? config_.input_size
                                                           : directions * hidden;
      add(pieces_, of_matrix, hidden * columns);
      if (config_.bias) add(biases, of_bias, hidden);
    }
  pieces_.insert(pieces_.end(), biases.begin(), biases.end());
  std::vector<Piece> joined;
  for (Piece piece : pieces_) {
    piece.ours = ours;
    ours += piece.count;
    if (!joined.empty() && joined.back().theirs + joined.back().count == piece.theirs)
      joined.back().count += piece.count;
    else
      joined.push_back(piece);
  }
  const bool is_ours = joined.size() == 1 && joined[0].theirs == 0 && ours * size == weight_bytes_;
  pieces_ = is_ours ? std::vector<Piece>() : joined;
}

// The lengths are in the descriptors. Since 8.9.1 the argument beside them, device memory, is not read.
void Recurrent::forward(Opaque stream, const void* x, const void* weights, const void* h0, const void* c0, void* y,
                        void* hy, void* cy, void* workspace, void* reserve) {
  const std::lock_guard lock(handle_->mutex);
  const bool is_training = reserve != nullptr;
  check(calls_.forward(handle_->on(stream), rnn_, is_training ? ForwardMode::kTraining : ForwardMode::kInference,
                       nullptr, x_, x, y_, y, h_, h0, hy, c_, c0, cy, weight_bytes_, weights,
                       is_training ? workspace_bytes_ : inference_bytes_, workspace, is_training ? reserve_bytes_ : 0,
                       reserve),
        "cudnnRNNForward");
}

void Recurrent::backward(Opaque stream, const void* dy, const void* dhy, const void* dcy, const void* x,
                         const void* weights, const void* h0, const void* c0, const void* y, void* dx, void* dweights,
                         void* dh0, void* dc0, void* workspace, void* reserve) {
  const std::lock_guard lock(handle_->mutex);
  const Opaque handle = handle_->on(stream);
  // in this order: the second reads what the first leaves in the reserve
  check(calls_.backward_data(handle, rnn_, nullptr, y_, y, dy, x_, dx, h_, h0, dhy, dh0, c_, c0, dcy, dc0,
                             weight_bytes_, weights, workspace_bytes_, workspace, reserve_bytes_, reserve),
        "cudnnRNNBackwardData_v8");
  check(calls_.backward_weights(handle, rnn_, WeightGradient::kAdd, nullptr, x_, x, h_, h0, y_, y, weight_bytes_,
                                dweights, workspace_bytes_, workspace, reserve_bytes_, reserve),
        "cudnnRNNBackwardWeights_v8");
}

}  // namespace singa_lite::cudnn
