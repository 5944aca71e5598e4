// SPDX-License-Identifier: Apache-2.0
#include "cuda/convolution.h"

#include <algorithm>

namespace singa_lite::cudnn {

namespace {

DirectionCalls load_direction(const Cudnn& cudnn, const char* name, const std::string& kind) {
  DirectionCalls calls;
  calls.name = name;
  cudnn.load(calls.run, name);
  cudnn.load(calls.find, "cudnnFindConvolution" + kind + "AlgorithmEx");
  cudnn.load(calls.rank, "cudnnGetConvolution" + kind + "Algorithm_v7");
  cudnn.load(calls.workspace_size, "cudnnGetConvolution" + kind + "WorkspaceSize");
  return calls;
}

}  // namespace

ConvolutionCalls::ConvolutionCalls(const Cudnn& cudnn)
    : directions{load_direction(cudnn, "cudnnConvolutionForward", "Forward"),
                 load_direction(cudnn, "cudnnConvolutionBackwardData", "BackwardData"),
                 load_direction(cudnn, "cudnnConvolutionBackwardFilter", "BackwardFilter")} {
  cudnn.load(create_filter, "cudnnCreateFilterDescriptor");
  cudnn.load(destroy_filter, "cudnnDestroyFilterDescriptor");
  cudnn.load(set_filter, "cudnnSetFilter4dDescriptor");
  cudnn.load(create_convolution, "cudnnCreateConvolutionDescriptor");
  cudnn.load(destroy_convolution, "cudnnDestroyConvolutionDescriptor");
  cudnn.load(set_convolution, "cudnnSetConvolution2dDescriptor");
  cudnn.load(set_groups, "cudnnSetConvolutionGroupCount");
  cudnn.load(set_math, "cudnnSetConvolutionMathType");
  cudnn.load(add_tensor, "cudnnAddTensor");
  cudnn.load(backward_bias, "cudnnConvolutionBackwardBias");
}

std::string Geometry::text() const {
  const char* order = layout == Layout::kChannelsLast ? " channels last" : "";
  return std::string(name_of(dtype)) + order + text_of(" x", x) + text_of(" w", w) + text_of(" y", y) +
         text_of(" stride", stride) + text_of(" padding", padding) + text_of(" dilation", dilation) + " groups " + std::to_string(groups);
}

Convolution::Convolution(std::shared_ptr<Handle> handle, Direction direction, const Geometry& geometry, bool allow_tf32)
    : handle_(std::move(handle)),
      cudnn_(*handle_->cudnn),
      calls_(*cudnn_.convolution),
      direction_calls_(calls_.directions[int(direction)]),
      direction_(direction),
      geometry_(geometry),
      x_(*handle_),
      y_(*handle_),
      bias_(*handle_),
      w_(handle_->cudnn, calls_.create_filter, calls_.destroy_filter),
      convolution_(handle_->cudnn, calls_.create_convolution, calls_.destroy_convolution) {
  const auto& [dtype, layout, x, w, y, stride, padding, dilation, groups] = geometry_;
  const DType compute = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  check(cudnn_.set_tensor(x_, layout, dtype, x[0], x[1], x[2], x[3]), "cudnnSetTensor4dDescriptor of x");
  check(calls_.set_filter(w_, dtype, layout, w[0], w[1], w[2], w[3]), "cudnnSetFilter4dDescriptor");
  check(cudnn_.set_tensor(y_, layout, dtype, y[0], y[1], y[2], y[3]), "cudnnSetTensor4dDescriptor of y");
  check(cudnn_.set_tensor(bias_, layout, dtype, 1, w[0], 1, 1), "cudnnSetTensor4dDescriptor of the bias");
  check(calls_.set_convolution(convolution_, padding[0], padding[1], stride[0], stride[1], dilation[0], dilation[1],
                               Mode::kCrossCorrelation, compute),
        "cudnnSetConvolution2dDescriptor");
  check(calls_.set_groups(convolution_, groups), "cudnnSetConvolutionGroupCount");
  wanted_math_ = math_of(dtype, allow_tf32);
  set_math(wanted_math_);
  a_ = direction == Direction::kBackwardData ? w_ : x_;
  b_ = direction == Direction::kForward ? w_ : y_;
  out_ = direction == Direction::kForward ? y_ : direction == Direction::kBackwardData ? x_ : w_;
}

void Convolution::check(Status status, const char* call) const {
  if (status != kSuccess) cudnn_.check(status, std::string(call) + " for " + geometry_.text());
}

void Convolution::set_math(Math math) {
  check(calls_.set_math(convolution_, math), "cudnnSetConvolutionMathType");
  math_ = math;
}

void Convolution::measure(Opaque stream, const void* a, const void* b, void* out, void* workspace,
                          std::size_t workspace_bytes) {
  const std::lock_guard lock(handle_->mutex);
  Performance candidates[kMostAlgorithms];
  int count = 0;
  set_math(wanted_math_);
  check(direction_calls_.find(handle_->on(stream), a_, a, b_, b, convolution_, out_, out, kMostAlgorithms, &count,
                              candidates, workspace, workspace_bytes),
        "timing the algorithms");
  choose(candidates, count, workspace_bytes);
}

void Convolution::estimate(std::size_t limit_bytes) {
  const std::lock_guard lock(handle_->mutex);
  Performance candidates[kMostAlgorithms];
  int count = 0;
  set_math(wanted_math_);
  check(direction_calls_.rank(handle_->object(), a_, b_, convolution_, out_, kMostAlgorithms, &count, candidates),
        "ranking the algorithms");
  choose(candidates, count, limit_bytes);
}

// Candidates come fastest first. Deterministic ones are preferred to all others, so that a step can be repeated bit for bit.
// cuDNN also tries its default arithmetic beside the one requested: where TF32 is not allowed such a candidate was
// timed with TF32, so it comes after the others and runs with the arithmetic requested.
void Convolution::choose(const Performance* candidates, int count, std::size_t limit_bytes) {
  std::vector<Performance> ranked(candidates, candidates + count);
  const auto preference = [&](const Performance& candidate) {
    return 2 * (candidate.determinism != Determinism::kDeterministic) +
           (wanted_math_ == Math::kFma && candidate.math != Math::kFma);
  };
  std::stable_sort(ranked.begin(), ranked.end(),
                   [&](const auto& a, const auto& b) { return preference(a) < preference(b); });
  std::string reasons;
  for (const Performance& candidate : ranked) {
    reasons += "; algorithm " + std::to_string(candidate.algorithm) + ": ";
    if (candidate.status != kSuccess) {
      reasons += "status " + std::to_string(int(candidate.status));
      continue;
    }
    set_math(wanted_math_ == Math::kFma ? Math::kFma : candidate.math);
    std::size_t bytes = 0;
    const Status status =
        direction_calls_.workspace_size(handle_->object(), a_, b_, convolution_, out_, candidate.algorithm, &bytes);
    if (status == kSuccess && bytes <= limit_bytes) {
      algorithm_ = candidate.algorithm;
      workspace_bytes_ = bytes;
      return;
    }
    reasons += status == kSuccess ? "needs " + std::to_string(bytes) + " bytes of workspace, more than " +
                                        std::to_string(limit_bytes)
                                  : "status " + std::to_string(int(status));
  }
  throw CudnnError(std::string(direction_calls_.name) + " has no algorithm for " + geometry_.text() + reasons);
}

void Convolution::run(Opaque stream, const void* a, const void* b, void* out, void* bias, void* workspace,
                      std::size_t workspace_bytes) {
  const std::lock_guard lock(handle_->mutex);
  if (algorithm_ < 0 || workspace_bytes < workspace_bytes_)
    throw std::logic_error("a convolution is run before its algorithm is chosen, or with too little workspace");
  const Opaque handle = handle_->on(stream);
  const void* one = scalar(geometry_.dtype, true);
  const void* zero = scalar(geometry_.dtype, false);
  check(direction_calls_.run(handle, one, a_, a, b_, b, convolution_, algorithm_, workspace, workspace_bytes_, zero,
                             out_, out),
        direction_calls_.name);
  if (bias == nullptr) return;
  if (direction_ == Direction::kForward)
    check(calls_.add_tensor(handle, one, bias_, bias, one, y_, out), "cudnnAddTensor");
  else if (direction_ == Direction::kBackwardWeight)
    check(calls_.backward_bias(handle, one, y_, b, zero, bias_, bias), "cudnnConvolutionBackwardBias");
}

}  // namespace singa_lite::cudnn
