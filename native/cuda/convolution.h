// SPDX-License-Identifier: Apache-2.0
// Convolutions by cuDNN.
//
// The older convolution calls are used: they choose among the same kernels as the graph calls for plain NCHW
// convolutions, but don't fuse.
#pragma once

#include "cuda/cudnn.h"

namespace singa_lite::cudnn {

// cuDNN's numbers.
enum class Mode : int { kCrossCorrelation = 1 };
enum class Determinism : int { kDeterministic = 1 };

// What cuDNN reports of one algorithm.
struct Performance {
  int algorithm;
  Status status;
  float time_ms;
  std::size_t memory_bytes;
  Determinism determinism;
  Math math;
  int reserved[3];
};

// One direction of a convolution: two inputs, a and b, and one output, each with a descriptor. The three directions
// have the same prototypes: forward (x, w) -> y, backward data (w, dy) -> dx, backward weight (x, dy) -> dw.
using Find = Status(Opaque handle, Opaque a, const void* a_data, Opaque b, const void* b_data, Opaque convolution,
                    Opaque out, void* out_data, int asked, int* found, Performance*, void* workspace, std::size_t);
using Rank = Status(Opaque handle, Opaque a, Opaque b, Opaque convolution, Opaque out, int asked, int* found,
                    Performance*);
using WorkspaceSize = Status(Opaque handle, Opaque a, Opaque b, Opaque convolution, Opaque out, int algorithm,
                             std::size_t*);
using Run = Status(Opaque handle, const void* alpha, Opaque a, const void* a_data, Opaque b, const void* b_data,
                   Opaque convolution, int algorithm, void* workspace, std::size_t, const void* beta, Opaque out,
                   void* out_data);
using SetFilter = Status(Opaque, DType, Layout, int outputs, int inputs, int h, int w);
using SetConvolution = Status(Opaque, int pad_h, int pad_w, int stride_h, int stride_w, int dilation_h, int dilation_w,
                              Mode, DType compute);
using SetGroups = Status(Opaque, int);
using SetMath = Status(Opaque, Math);
using AddTensor = Status(Opaque handle, const void* alpha, Opaque a, const void* a_data, const void* beta, Opaque c,
                         void* c_data);
using BackwardBias = Status(Opaque handle, const void* alpha, Opaque dy, const void* dy_data, const void* beta,
                            Opaque db, void* db_data);

enum class Direction : int { kForward, kBackwardData, kBackwardWeight };

struct DirectionCalls {
  const char* name;
  Find* find;
  Rank* rank;
  WorkspaceSize* workspace_size;
  Run* run;
};

struct ConvolutionCalls {
  explicit ConvolutionCalls(const Cudnn& cudnn);

  Create *create_filter, *create_convolution;
  Destroy *destroy_filter, *destroy_convolution;
  SetFilter* set_filter;
  SetConvolution* set_convolution;
  SetGroups* set_groups;
  SetMath* set_math;
  AddTensor* add_tensor;
  BackwardBias* backward_bias;
  DirectionCalls directions[3];
};

// x (N, C, H, W), w (O, C / groups, kh, kw), y (N, O, oh, ow); pairs are (height, width).
struct Geometry {
  DType dtype;
  Layout layout;  // of x, y and w
  Shape x, w, y;
  Pair stride, padding, dilation;
  int groups;

  std::string text() const;
};

// One direction of one convolution: its descriptors and, once chosen, its algorithm. Sums are float32, or float64 for
// float64. All data are on the handle's device; inputs a and b as in the note of Find.
class Convolution {
 public:
  Convolution(std::shared_ptr<Handle> handle, Direction direction, const Geometry& geometry, bool allow_tf32);

  // Times every algorithm that `workspace_bytes` permit and keeps the fastest; overwrites `out`, waits for the device.
  // Must not be called while the stream is captured.
  void measure(Opaque stream, const void* a, const void* b, void* out, void* workspace, std::size_t workspace_bytes);
  // Keeps the algorithm cuDNN expects to be the fastest with at most `limit_bytes` of workspace; starts nothing.
  void estimate(std::size_t limit_bytes);
  // Starts the convolution on `stream`. `bias`, if not null, has O elements: forward adds it to y, backward weight
  // writes the sum of dy to it.
  void run(Opaque stream, const void* a, const void* b, void* out, void* bias, void* workspace,
           std::size_t workspace_bytes);

  int algorithm() const { return algorithm_; }  // cuDNN's number; -1 until one is chosen
  Math math() const { return math_; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  static constexpr int kMostAlgorithms = 16;  // cuDNN has 8, some with two kinds of arithmetic

  void check(Status status, const char* call) const;
  void choose(const Performance* candidates, int count, std::size_t limit_bytes);
  void set_math(Math math);

  std::shared_ptr<Handle> handle_;
  const Cudnn& cudnn_;
  const ConvolutionCalls& calls_;
  const DirectionCalls& direction_calls_;
  Direction direction_;
  Geometry geometry_;
  Math wanted_math_;
  Tensor x_, y_, bias_;
  Object w_, convolution_;
  Opaque a_ = nullptr, b_ = nullptr, out_ = nullptr;
  int algorithm_ = -1;
  Math math_ = Math::kDefault;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace singa_lite::cudnn
