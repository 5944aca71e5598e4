// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn.h"

#include <algorithm>
#include <sstream>

namespace singa_lite::cudnn {

namespace {

Library open(const std::vector<std::string>& names) {
  try {
    return Library(names);
  } catch (const std::runtime_error& error) {
    throw CudnnError(std::string("cuDNN 9 cannot be opened: ") + error.what());
  }
}

// 1 or 0 in the type that cuDNN reads beside data of `dtype`.
const void* scalar(DType dtype, bool one) {
  static constexpr float kFloats[] = {0, 1};
  static constexpr double kDoubles[] = {0, 1};
  return dtype == DType::kFloat64 ? static_cast<const void*>(&kDoubles[one]) : &kFloats[one];
}

template <std::size_t n>
void write(std::ostream& to, const char* name, const std::array<int, n>& values) {
  to << name;
  for (std::size_t i = 0; i < n; ++i) to << (i ? ", " : " (") << values[i];
  to << ')';
}

}  // namespace

template <class Function>
void Cudnn::load(Function*& function, const char* symbol) const {
  function = library_.find<Function>(symbol);
  if (function == nullptr)
    throw CudnnError(library_.name() + " (version " + std::to_string(version_) + ") has no function " + symbol);
}

void Cudnn::load(DirectionCalls& calls, const char* name, const std::string& kind) const {
  calls.name = name;
  load(calls.run, name);
  load(calls.find, ("cudnnFindConvolution" + kind + "AlgorithmEx").c_str());
  load(calls.rank, ("cudnnGetConvolution" + kind + "Algorithm_v7").c_str());
  load(calls.workspace_size, ("cudnnGetConvolution" + kind + "WorkspaceSize").c_str());
}

Cudnn::Cudnn(const std::vector<std::string>& names) : library_(open(names)) {
  Version* version;
  load(version, "cudnnGetVersion");
  version_ = version();
  if (version_ < kOldest)
    throw CudnnError(library_.name() + " is cuDNN version number " + std::to_string(version_) + ", but at least " +
                     std::to_string(kOldest) + " (9.0) is needed");
  load(error_text_, "cudnnGetErrorString");
  load(last_error_text_, "cudnnGetLastErrorString");
  load(create_handle, "cudnnCreate");
  load(destroy_handle, "cudnnDestroy");
  load(set_stream, "cudnnSetStream");
  load(create_tensor, "cudnnCreateTensorDescriptor");
  load(destroy_tensor, "cudnnDestroyTensorDescriptor");
  load(set_tensor, "cudnnSetTensor4dDescriptor");
  load(create_filter, "cudnnCreateFilterDescriptor");
  load(destroy_filter, "cudnnDestroyFilterDescriptor");
  load(set_filter, "cudnnSetFilter4dDescriptor");
  load(create_convolution, "cudnnCreateConvolutionDescriptor");
  load(destroy_convolution, "cudnnDestroyConvolutionDescriptor");
  load(set_convolution, "cudnnSetConvolution2dDescriptor");
  load(set_groups, "cudnnSetConvolutionGroupCount");
  load(set_math, "cudnnSetConvolutionMathType");
  load(add_tensor, "cudnnAddTensor");
  load(backward_bias, "cudnnConvolutionBackwardBias");
  load(directions_[0], "cudnnConvolutionForward", "Forward");
  load(directions_[1], "cudnnConvolutionBackwardData", "BackwardData");
  load(directions_[2], "cudnnConvolutionBackwardFilter", "BackwardFilter");
}

void Cudnn::check(Status status, const std::string& what) const {
  if (status == kSuccess) return;
  char reason[512] = "";
  last_error_text_(reason, sizeof reason);
  reason[sizeof reason - 1] = '\0';
  std::string text = what + ": " + error_text_(status) + " (" + std::to_string(int(status)) + ")";
  if (reason[0] != '\0') text += std::string(": ") + reason;
  throw CudnnError(text);
}

Object::Object(std::shared_ptr<const Cudnn> cudnn, Create* create, Destroy* destroy)
    : cudnn_(std::move(cudnn)), destroy_(destroy) {
  cudnn_->check(create(&object_), create == cudnn_->create_handle ? "cudnnCreate" : "cuDNN descriptor");
}

Opaque Handle::on(Opaque stream) {
  if (stream != stream_) {
    cudnn->check(cudnn->set_stream(object_, stream), "cudnnSetStream");
    stream_ = stream;
  }
  return object_;
}

std::string Geometry::text() const {
  static constexpr const char* kNames[] = {"float32", "float64", "float16"};
  std::ostringstream text;
  text << kNames[int(dtype)];
  write(text, " x", x);
  write(text, " w", w);
  write(text, " y", y);
  write(text, " stride", stride);
  write(text, " padding", padding);
  write(text, " dilation", dilation);
  text << " groups " << groups;
  return text.str();
}

Convolution::Convolution(std::shared_ptr<Handle> handle, Direction direction, const Geometry& geometry, bool allow_tf32)
    : handle_(std::move(handle)),
      cudnn_(*handle_->cudnn),
      calls_(cudnn_.calls(direction)),
      direction_(direction),
      geometry_(geometry),
      x_(handle_->cudnn, cudnn_.create_tensor, cudnn_.destroy_tensor),
      w_(handle_->cudnn, cudnn_.create_filter, cudnn_.destroy_filter),
      y_(handle_->cudnn, cudnn_.create_tensor, cudnn_.destroy_tensor),
      bias_(handle_->cudnn, cudnn_.create_tensor, cudnn_.destroy_tensor),
      convolution_(handle_->cudnn, cudnn_.create_convolution, cudnn_.destroy_convolution) {
  const auto& [dtype, x, w, y, stride, padding, dilation, groups] = geometry_;
  const DType compute = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  check(cudnn_.set_tensor(x_, Layout::kNchw, dtype, x[0], x[1], x[2], x[3]), "cudnnSetTensor4dDescriptor of x");
  check(cudnn_.set_filter(w_, dtype, Layout::kNchw, w[0], w[1], w[2], w[3]), "cudnnSetFilter4dDescriptor");
  check(cudnn_.set_tensor(y_, Layout::kNchw, dtype, y[0], y[1], y[2], y[3]), "cudnnSetTensor4dDescriptor of y");
  check(cudnn_.set_tensor(bias_, Layout::kNchw, dtype, 1, w[0], 1, 1), "cudnnSetTensor4dDescriptor of the bias");
  check(cudnn_.set_convolution(convolution_, padding[0], padding[1], stride[0], stride[1], dilation[0], dilation[1],
                               Mode::kCrossCorrelation, compute),
        "cudnnSetConvolution2dDescriptor");
  check(cudnn_.set_groups(convolution_, groups), "cudnnSetConvolutionGroupCount");
  // cuDNN's default arithmetic rounds float32 inputs to TF32 where the device has it
  wanted_math_ = dtype == DType::kFloat16                 ? Math::kTensorOp
                 : dtype == DType::kFloat32 && !allow_tf32 ? Math::kFma
                                                          : Math::kDefault;
  set_math(wanted_math_);
  a_ = direction == Direction::kBackwardData ? w_ : x_;
  b_ = direction == Direction::kForward ? w_ : y_;
  out_ = direction == Direction::kForward ? y_ : direction == Direction::kBackwardData ? x_ : w_;
}

void Convolution::check(Status status, const char* call) const {
  if (status != kSuccess) cudnn_.check(status, std::string(call) + " for " + geometry_.text());
}

void Convolution::set_math(Math math) {
  check(cudnn_.set_math(convolution_, math), "cudnnSetConvolutionMathType");
  math_ = math;
}

void Convolution::measure(Opaque stream, const void* a, const void* b, void* out, void* workspace,
                          std::size_t workspace_bytes) {
  const std::lock_guard lock(handle_->mutex);
  Performance candidates[kMostAlgorithms];
  int count = 0;
  set_math(wanted_math_);
  check(calls_.find(handle_->on(stream), a_, a, b_, b, convolution_, out_, out, kMostAlgorithms, &count, candidates,
                    workspace, workspace_bytes),
        "timing the algorithms");
  choose(candidates, count, workspace_bytes);
}

void Convolution::estimate(std::size_t limit_bytes) {
  const std::lock_guard lock(handle_->mutex);
  Performance candidates[kMostAlgorithms];
  int count = 0;
  set_math(wanted_math_);
  check(calls_.rank(handle_->object(), a_, b_, convolution_, out_, kMostAlgorithms, &count, candidates),
        "ranking the algorithms");
  choose(candidates, count, limit_bytes);
}

// Candidates come fastest first. Deterministic ones are preferred to all others, so that a step repeats bit for bit.
// cuDNN also tries its default arithmetic beside the one asked for: where TF32 is not allowed such a candidate was
// timed with TF32, so it comes after the others and runs with the arithmetic asked for.
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
        calls_.workspace_size(handle_->object(), a_, b_, convolution_, out_, candidate.algorithm, &bytes);
    if (status == kSuccess && bytes <= limit_bytes) {
      algorithm_ = candidate.algorithm;
      workspace_bytes_ = bytes;
      return;
    }
    reasons += status == kSuccess ? "needs " + std::to_string(bytes) + " bytes of workspace, more than " +
                                        std::to_string(limit_bytes)
                                  : "status " + std::to_string(int(status));
  }
  throw CudnnError(std::string(calls_.name) + " has no algorithm for " + geometry_.text() + reasons);
}

void Convolution::run(Opaque stream, const void* a, const void* b, void* out, void* bias, void* workspace,
                      std::size_t workspace_bytes) {
  const std::lock_guard lock(handle_->mutex);
  if (algorithm_ < 0 || workspace_bytes < workspace_bytes_)
    throw std::logic_error("a convolution is run before its algorithm is chosen, or with too little workspace");
  const Opaque handle = handle_->on(stream);
  const void* one = scalar(geometry_.dtype, true);
  const void* zero = scalar(geometry_.dtype, false);
  check(calls_.run(handle, one, a_, a, b_, b, convolution_, algorithm_, workspace, workspace_bytes_, zero, out_, out),
        calls_.name);
  if (bias == nullptr) return;
  if (direction_ == Direction::kForward)
    check(cudnn_.add_tensor(handle, one, bias_, bias, one, y_, out), "cudnnAddTensor");
  else if (direction_ == Direction::kBackwardWeight)
    check(cudnn_.backward_bias(handle, one, y_, b, zero, bias_, bias), "cudnnConvolutionBackwardBias");
}

}  // namespace singa_lite::cudnn
