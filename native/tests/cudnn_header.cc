// SPDX-License-Identifier: Apache-2.0
// Compiles only if the prototypes and numbers of native/cuda are those of NVIDIA's cudnn.h. Not part of the
// build: tests/backend/test_cudnn.py compiles it where that header is installed, and everywhere with
// -DWITHOUT_CUDNN_HEADER, by which at least the names of native/cuda are checked.
#ifndef WITHOUT_CUDNN_HEADER
#include <cudnn.h>
#endif

#include <cstddef>
#include <type_traits>

#include "cuda/convolution.h"
#include "cuda/cudnn.h"
#include "cuda/norm.h"
#include "cuda/rnn.h"

namespace ours = singa_lite::cudnn;

// The same register or stack slot: pointers are alike, numbers must have the same kind and size.
template <class A, class B>
constexpr bool is_alike() {
  using X = std::remove_cv_t<A>;
  using Y = std::remove_cv_t<B>;
  if constexpr (std::is_pointer_v<X> || std::is_pointer_v<Y>) return std::is_pointer_v<X> && std::is_pointer_v<Y>;
  else if constexpr (std::is_void_v<X>) return std::is_void_v<Y>;
  else return std::is_floating_point_v<X> == std::is_floating_point_v<Y> && sizeof(X) == sizeof(Y);
}

template <class Mine, class Theirs>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
struct Alike<R(A...), S(B...)> {
  template <bool same_length, class = void>
  struct Arguments : std::false_type {};
  template <class Unused>
  struct Arguments<true, Unused> : std::bool_constant<(is_alike<A, B>() && ...)> {};
  static constexpr bool value = is_alike<R, S>() && Arguments<sizeof...(A) == sizeof...(B)>::value;
};

#ifdef WITHOUT_CUDNN_HEADER
#define SAME(mine, theirs) static_assert(std::is_function_v<mine>, #theirs)
#define EQUAL(mine, theirs) static_assert(int(mine) >= 0, #theirs)
#else
#define SAME(mine, theirs) static_assert(Alike<mine, decltype(theirs)>::value, #theirs)
#define EQUAL(mine, theirs) static_assert(int(mine) == int(theirs), #theirs)
#endif
SAME(ours::Version, cudnnGetVersion);
SAME(ours::ErrorText, cudnnGetErrorString);
SAME(ours::LastErrorText, cudnnGetLastErrorString);
SAME(ours::Create, cudnnCreate);
SAME(ours::Create, cudnnCreateTensorDescriptor);
SAME(ours::Create, cudnnCreateFilterDescriptor);
SAME(ours::Create, cudnnCreateConvolutionDescriptor);
SAME(ours::Destroy, cudnnDestroy);
SAME(ours::Destroy, cudnnDestroyTensorDescriptor);
SAME(ours::Destroy, cudnnDestroyFilterDescriptor);
SAME(ours::Destroy, cudnnDestroyConvolutionDescriptor);
SAME(ours::SetStream, cudnnSetStream);
SAME(ours::SetTensor, cudnnSetTensor4dDescriptor);
SAME(ours::SetFilter, cudnnSetFilter4dDescriptor);
SAME(ours::SetConvolution, cudnnSetConvolution2dDescriptor);
SAME(ours::SetGroups, cudnnSetConvolutionGroupCount);
SAME(ours::SetMath, cudnnSetConvolutionMathType);
SAME(ours::AddTensor, cudnnAddTensor);
SAME(ours::BackwardBias, cudnnConvolutionBackwardBias);
SAME(ours::Find, cudnnFindConvolutionForwardAlgorithmEx);
SAME(ours::Find, cudnnFindConvolutionBackwardDataAlgorithmEx);
SAME(ours::Find, cudnnFindConvolutionBackwardFilterAlgorithmEx);
SAME(ours::Rank, cudnnGetConvolutionForwardAlgorithm_v7);
SAME(ours::Rank, cudnnGetConvolutionBackwardDataAlgorithm_v7);
SAME(ours::Rank, cudnnGetConvolutionBackwardFilterAlgorithm_v7);
SAME(ours::WorkspaceSize, cudnnGetConvolutionForwardWorkspaceSize);
SAME(ours::WorkspaceSize, cudnnGetConvolutionBackwardDataWorkspaceSize);
SAME(ours::WorkspaceSize, cudnnGetConvolutionBackwardFilterWorkspaceSize);
SAME(ours::Run, cudnnConvolutionForward);
SAME(ours::Run, cudnnConvolutionBackwardData);
SAME(ours::Run, cudnnConvolutionBackwardFilter);
SAME(ours::DeriveParameters, cudnnDeriveBNTensorDescriptor);
SAME(ours::NormTrain, cudnnBatchNormalizationForwardTraining);
SAME(ours::NormInfer, cudnnBatchNormalizationForwardInference);
SAME(ours::NormBackward, cudnnBatchNormalizationBackward);

SAME(ours::Create, cudnnCreateRNNDescriptor);
SAME(ours::Create, cudnnCreateRNNDataDescriptor);
SAME(ours::Create, cudnnCreateDropoutDescriptor);
SAME(ours::Destroy, cudnnDestroyRNNDescriptor);
SAME(ours::Destroy, cudnnDestroyRNNDataDescriptor);
SAME(ours::Destroy, cudnnDestroyDropoutDescriptor);
SAME(ours::SetTensorNd, cudnnSetTensorNdDescriptor);
SAME(ours::SetDropout, cudnnSetDropoutDescriptor);
SAME(ours::SetRnn, cudnnSetRNNDescriptor_v8);
SAME(ours::SetRnnData, cudnnSetRNNDataDescriptor);
SAME(ours::WeightSize, cudnnGetRNNWeightSpaceSize);
SAME(ours::WeightAddress, cudnnGetRNNWeightParams);
SAME(ours::TemporarySizes, cudnnGetRNNTempSpaceSizes);
SAME(ours::RnnForward, cudnnRNNForward);
SAME(ours::RnnBackwardData, cudnnRNNBackwardData_v8);
SAME(ours::RnnBackwardWeights, cudnnRNNBackwardWeights_v8);

EQUAL(ours::kSuccess, CUDNN_STATUS_SUCCESS);
EQUAL(ours::DType::kFloat32, CUDNN_DATA_FLOAT);
EQUAL(ours::DType::kFloat64, CUDNN_DATA_DOUBLE);
EQUAL(ours::DType::kFloat16, CUDNN_DATA_HALF);
EQUAL(ours::DType::kBFloat16, CUDNN_DATA_BFLOAT16);
EQUAL(ours::Layout::kRowMajor, CUDNN_TENSOR_NCHW);
EQUAL(ours::Layout::kChannelsLast, CUDNN_TENSOR_NHWC);
EQUAL(ours::Mode::kCrossCorrelation, CUDNN_CROSS_CORRELATION);
EQUAL(ours::Math::kDefault, CUDNN_DEFAULT_MATH);
EQUAL(ours::Math::kTensorOp, CUDNN_TENSOR_OP_MATH);
EQUAL(ours::Math::kFma, CUDNN_FMA_MATH);
EQUAL(ours::Determinism::kDeterministic, CUDNN_DETERMINISTIC);
EQUAL(ours::NormMode::kSpatial, CUDNN_BATCHNORM_SPATIAL);
EQUAL(ours::RnnMode::kRelu, CUDNN_RNN_RELU);
EQUAL(ours::RnnMode::kTanh, CUDNN_RNN_TANH);
EQUAL(ours::RnnMode::kLstm, CUDNN_LSTM);
EQUAL(ours::RnnMode::kGru, CUDNN_GRU);
EQUAL(ours::RnnAlgorithm::kStandard, CUDNN_RNN_ALGO_STANDARD);
EQUAL(ours::BiasMode::kNone, CUDNN_RNN_NO_BIAS);
EQUAL(ours::BiasMode::kDouble, CUDNN_RNN_DOUBLE_BIAS);
EQUAL(ours::Directions::kOne, CUDNN_UNIDIRECTIONAL);
EQUAL(ours::Directions::kBoth, CUDNN_BIDIRECTIONAL);
EQUAL(ours::InputMode::kLinear, CUDNN_LINEAR_INPUT);
EQUAL(ours::SequenceLayout::kUnpacked, CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED);
EQUAL(ours::SequenceLayout::kPacked, CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED);
EQUAL(ours::PaddedIo::kOff, CUDNN_RNN_PADDED_IO_DISABLED);
EQUAL(ours::PaddedIo::kOn, CUDNN_RNN_PADDED_IO_ENABLED);
EQUAL(ours::ForwardMode::kInference, CUDNN_FWD_MODE_INFERENCE);
EQUAL(ours::ForwardMode::kTraining, CUDNN_FWD_MODE_TRAINING);
EQUAL(ours::WeightGradient::kAdd, CUDNN_WGRAD_MODE_ADD);

#ifndef WITHOUT_CUDNN_HEADER
static_assert(CUDNN_BN_MIN_EPSILON <= 1e-5, "backward gives that eps; forward any above 0");
static_assert(CUDNN_VERSION / 10000 == ours::Cudnn::kOldest / 10000, "the major version");

#define SAME_RESULTS(theirs)                                                                            \
  static_assert(sizeof(ours::Performance) == sizeof(theirs), #theirs);                                  \
  static_assert(offsetof(ours::Performance, algorithm) == offsetof(theirs, algo), #theirs);             \
  static_assert(offsetof(ours::Performance, status) == offsetof(theirs, status), #theirs);              \
  static_assert(offsetof(ours::Performance, time_ms) == offsetof(theirs, time), #theirs);               \
  static_assert(offsetof(ours::Performance, memory_bytes) == offsetof(theirs, memory), #theirs);        \
  static_assert(offsetof(ours::Performance, determinism) == offsetof(theirs, determinism), #theirs);    \
  static_assert(offsetof(ours::Performance, math) == offsetof(theirs, mathType), #theirs)
SAME_RESULTS(cudnnConvolutionFwdAlgoPerf_t);
SAME_RESULTS(cudnnConvolutionBwdDataAlgoPerf_t);
SAME_RESULTS(cudnnConvolutionBwdFilterAlgoPerf_t);
#endif
