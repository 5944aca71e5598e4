// SPDX-License-Identifier: Apache-2.0
// oneDNN's side of the kernels: one CPU engine, primitives kept by what they were made for, and calls on plain arrays.
//
// An OnednnCall is a primitive with the memory formats it chose. Where they differ from the caller's plain arrays it reorders
// through thread-local scratch. A large result whose rows are as many bytes in both formats is written to the caller's array and
// put in order there, some rows at a time: the scratch for a gradient of 512 x 512 3 x 3 weights is 1.2 MB instead of 9.4.
//
// Note [slow reorders]: without AVX-512 oneDNN has no fast code that reads or writes bfloat16: reordering the images behind the
// MNIST CNN's last pooling takes 6 ms, as floats .04. There arrays are widened and rounded by loops of ours, and reordered as
// floats.
#pragma once

#ifdef SINGA_LITE_ONEDNN

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

namespace singa_lite {

using DataType = dnnl::memory::data_type;

const dnnl::engine& onednn_engine();

// What primitives compute with on arrays of float or bfloat16. Where it is float for arrays of bfloat16, an OnednnCall widens
// what it reads and rounds what it writes.
//
// Note [bfloat16 products]: bfloat16 where the processor multiplies it faster than float. That it has AVX512_BF16 is not
// enough: a core of an Emerald Rapids whose AMX is off makes 85 GFLOP/s with its VDPBF16PS and 175 with VFMADD, and ResNet-18's
// convolutions take it 1.7 times as long as in float. So there, as without the instructions, products are of float.
// ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 has the instructions used all the same.
DataType computed_type(bool is_bfloat16);
bool has_avx512();  // as oneDNN sees it, which ONEDNN_MAX_CPU_ISA changes
inline DataType array_type(bool is_bfloat16) { return is_bfloat16 ? DataType::bf16 : DataType::f32; }

class OnednnCall {
 public:
  // Where the primitive has argument arg (DNNL_ARG_...), the caller's array has the format plain and the primitive wants
  // chosen. widened is plain with floats, where that is an array of bfloat16 for a primitive of float.
  struct Slot {
    int arg;
    dnnl::memory::desc plain, chosen;
    bool is_output;
    dnnl::memory::desc widened = {};
  };

  // Of a primitive whose attributes are call_attributes().
  template <class Desc>
  OnednnCall(const dnnl::primitive& primitive, const Desc& desc, std::vector<Slot> slots)
      : OnednnCall(primitive, std::move(slots), desc.scratchpad_desc()) {}

  // arrays: one per slot, in their order.
  void run(const std::vector<const void*>& arrays) const;

 private:
  struct Conversion {
    bool is_widened = false;  // by a loop, see Note [slow reorders]
    dnnl::reorder reorder;    // empty where nothing else has to change
    std::int64_t parts = 0;   // of the caller's array, which reorder puts in order one by one; 0 where it reads scratch
    dnnl::memory::desc from, to;  // one of them
  };

  OnednnCall(const dnnl::primitive& primitive, std::vector<Slot> slots, const dnnl::memory::desc& scratchpad);
  static void put_in_order(const Conversion& conversion, void* array, dnnl::memory part);

  dnnl::primitive primitive_;
  std::vector<Slot> slots_;
  std::vector<Conversion> conversions_;  // per slot
  dnnl::memory::desc scratchpad_;
  std::size_t scratch_bytes_ = 0;
};

// Attributes with which a primitive computes in scratch of the calling thread, which all share, so that threads may run one
// at the same time.
dnnl::primitive_attr call_attributes();

using Dims = dnnl::memory::dims;

// A ReLU as the first post-op of a primitive: PReLU with a weight of 0, which keeps NaN, while oneDNN's eltwise_relu gives 0 for
// it and hides that a model has diverged. -inf becomes NaN, and a negative number -0. Processors without AVX2, on which PReLU
// takes up to 7 times as long, have eltwise_relu.
dnnl::post_ops relu_post_ops();

// The argument for the weight of that PReLU, beside results of so many axes, and the array to pass.
OnednnCall::Slot prelu_weight_slot(std::size_t num_axes);
inline constexpr float kPreluWeight = 0;

// The description of (batch, channels, height, width) in blocks of b channels, see Note [memory formats] in layout.h.
dnnl::memory::desc blocked(const Dims& dims, DataType type, std::int64_t block);

// The block of such a description, or 0 if it has none.
std::int64_t block_of(const Dims& dims, const dnnl::memory::desc& desc);

// The arrays are of that type, in blocks; desc where that is the same memory, so that nothing is reordered.
dnnl::memory::desc blocked_like(const Dims& dims, DataType type, std::int64_t block, const dnnl::memory::desc& desc);

// What an OnednnCall was made for: the kind of kernel and its numbers; the number of threads is added.
using CallKey = std::vector<std::int64_t>;

// The OnednnCall for key, made by make() at its first use. Null if oneDNN has no code for it.
std::shared_ptr<const OnednnCall> cached_call(CallKey key, const std::function<OnednnCall()>& make);

}  // namespace singa_lite

#endif
