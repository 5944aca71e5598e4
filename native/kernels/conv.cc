// SPDX-License-Identifier: Apache-2.0
#include "kernels/conv.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/memory.h"
#include "kernels/onednn.h"
#include "kernels/tiles.h"
#include "kernels/winograd.h"
#include "kernels/winograd_tiles.h"

namespace singa_lite {

#ifdef SINGA_LITE_ONEDNN
namespace {

using Tag = dnnl::memory::format_tag;
using Desc = dnnl::memory::desc;

bool has_idle_tap(const Conv& c) {
  for (const int axis : {0, 1}) {
    const std::int64_t size = axis ? c.width : c.height, count = axis ? c.out_width : c.out_height, stride = c.stride[axis];
    for (std::int64_t tap = 0; tap < c.kernel[axis]; ++tap) {
      const std::int64_t first = tap * c.dilation[axis] - c.padding[axis];
      const std::int64_t index = std::max<std::int64_t>(0, (stride - 1 - first) / stride);  // of the first pixel from 0 on
      if (index >= count || first + index * stride >= size) return true;
    }
  }
  return false;
}

// What the primitive computes in. oneDNN 3.2's gradient of weights by AVX-512 BF16 writes nothing where a row or column of
// the filter meets no pixel (is idle), such as the outer ones of 3 x 3 with stride 2 and padding 1 on an image of 1 x 1, and
// reads behind x where a stride passes over pixels, such as one of 4 over 3 columns, and results are one pixel wide: a NaN
// there reaches the gradient. Wider ones of 1 x 1, which networks have, do not.
DataType type_for(const Conv& c, ConvKind kind) {
  const bool is_1x1 = c.kernel[0] * c.kernel[1] == 1;
  const bool passes_over = (c.stride[0] > c.kernel[0] || c.stride[1] > c.kernel[1]) && (!is_1x1 || c.out_width == 1);
  const bool is_wrong = kind == ConvKind::kBackwardWeight && (passes_over || has_idle_tap(c));
  return is_wrong ? DataType::f32 : computed_type(c.is_bfloat16);
}

// The arrays of one convolution as oneDNN's descriptions: the caller's, and with a format for the primitive to choose.
struct Shapes {
  Dims x, w, b, y, stride, dilation, padding;
  bool has_groups;
  DataType computed, given;  // by the primitive, by the caller

  Shapes(const Conv& c, ConvKind kind)
      : x{c.batch, c.channels, c.height, c.width},
        w{c.outputs, c.channels / c.groups, c.kernel[0], c.kernel[1]},
        b{c.outputs},
        y{c.batch, c.outputs, c.out_height, c.out_width},
        stride{c.stride[0], c.stride[1]},
        dilation{c.dilation[0] - 1, c.dilation[1] - 1},
        padding{c.padding[0], c.padding[1]},
        has_groups(c.groups > 1),
        computed(type_for(c, kind)),
        given(array_type(c.is_bfloat16)) {
    if (has_groups) w = {c.groups, c.outputs / c.groups, c.channels / c.groups, c.kernel[0], c.kernel[1]};
  }
  Desc image(const Dims& dims, Tag tag) const { return {dims, computed, tag}; }
  Desc weights(DataType type) const { return {w, type, has_groups ? Tag::goihw : Tag::oihw}; }
  Desc any_weights(DataType type) const { return {w, type, Tag::any}; }
  Desc bias() const { return {b, DataType::f32, Tag::x}; }
};

CallKey key_of(ConvKind kind, const Conv& c, bool has_bias) {
  return {std::int64_t(kind), c.batch,     c.channels,  c.height,     c.width,      c.outputs,     c.out_height,
          c.out_width, c.kernel[0], c.kernel[1], c.stride[0],  c.stride[1],  c.padding[0],  c.padding[1],
          c.dilation[0], c.dilation[1], c.groups, has_bias, c.x_block, c.y_block, c.relu, c.is_bfloat16, c.has_float_weights};
}

// Which format the primitive works in; the reorders from and to plain arrays are part of every time below (1 thread, EPYC
// Zen 4, AVX-512 / held to AVX2; ms; forward, backward data, backward weight).
// - Blocks of 8 or 16 channels are filled up with zeros: 20 -> 50 channels 5x5, batch 64, takes 3.8 3.9 4.5 / 3.0 5.5 3.7 in
//   oneDNN's own choice, 2.7 3.4 2.8 / 2.4 3.6 3.2 with channels last, 3.4 3.7 3.6 / 3.1 3.6 3.7 plain.
// - With one channel its choice for the gradient of the weights is 0.9 / 4.8, channels last 1.1 / 1.3, plain 2.3 / 2.1.
// - The gradient of few channels (3 -> 64, 7x7) is 33 / 22 in its choice, 25 / 19 channels last, 11 / 8 plain.
// - Where blocks are full its choice is best or within 10 %: 64 -> 64 channels 3x3, 23 25 28 / 26 31 35 against
//   27 26 34 / 30 34 47 channels last and 66 71 91 / 35 54 51 plain.
Tag image_tag(const Conv& c, ConvKind kind) {
  if (c.groups > 1) return Tag::any;
  if (kind == ConvKind::kBackwardData && c.channels <= 4) return Tag::nchw;
  // oneDNN 3.2's jit_1x1 writes beyond its memory there with channels last, unless they fill a vector
  const bool is_strided_1x1 = c.kernel[0] * c.kernel[1] == 1 && c.stride[0] * c.stride[1] > 1;
  if (kind == ConvKind::kBackwardWeight && is_strided_1x1 && c.channels % 16 != 0) return Tag::nchw;
  const bool has_part_blocks = (c.channels > 4 && c.channels % 8 != 0) || c.outputs % 8 != 0;
  return has_part_blocks || c.channels == 1 ? Tag::nhwc : Tag::any;
}

std::optional<bool> wanted_winograd;

// How often a filter of 3 meets a pixel of `size` where it makes out_size results.
std::int64_t num_products(std::int64_t size, std::int64_t padding, std::int64_t out_size) {
  std::int64_t products = 0;
  for (std::int64_t tap = 0; tap < 3; ++tap)
    products += std::max<std::int64_t>(0, std::min(out_size, size + padding - tap) - std::max<std::int64_t>(0, padding - tap));
  return products;
}

// Whether Winograd's products are used rather than oneDNN's direct convolutions (1 thread, ms; forward, backward data,
// backward weight).
// - EPYC Zen 3, which has no AVX-512: 64 channels of 32 x 32, batch 32: 20 20 19 against 31 26 41; 512 of 4 x 4, batch 32:
//   19 24 24 against 42 45 90. Zen 4, which has it: 16.5 14.7 15.1 against 20.6 20.5 24.9; 14.0 12.2 12.1 against 16.6 17.2 24.1.
// - Fewer channels leave little between the transforms: 32 of 16 x 16, batch 32, take 1.7 1.4 1.3 against 2.2 2.0 2.2, 16 of
//   32 x 32 take 3.0 3.5 3.4 against 2.4 2.4 2.4; on Zen 4 32 of 16 x 16, batch 64, take 2.4 2.1 1.9 against 2.4 2.4 2.7, which
//   processors with two units for AVX-512 have not been seen to share.
// - With few tiles the weights' transforms count: 512 of 4 x 4, batch 1, take 4.7 4.4 3.4 against 3.2 2.6 3.4.
// - Tiles that lie half outside cost what whole ones do, while direct convolutions skip what is outside: 64 of 1 x 100, batch
//   32, take 3.5 times as long.
// - Products of bfloat16 numbers, where the processor has them, take direct convolutions half the time.
bool is_winograd(const Conv& c, ConvKind kind) {
  constexpr std::int64_t kLeastChannels = 32, kLeastChannelsWithAvx512 = 64;
  const auto pays_off = [&] {
    return processor_level() >= 3 && computed_type(c.is_bfloat16) == DataType::f32 &&
           (!has_avx512() || std::min(c.channels, c.outputs) >= kLeastChannelsWithAvx512);
  };
  if (!has_winograd(c) || std::min(c.channels, c.outputs) < kLeastChannels) return false;
  if (wanted_winograd ? !*wanted_winograd : !pays_off()) return false;
  const bool is_data = kind == ConvKind::kBackwardData;
  const std::int64_t tiles = ((is_data ? c.height : c.out_height) + 1) / 2 * (((is_data ? c.width : c.out_width) + 1) / 2);
  const std::int64_t products =
      num_products(c.height, c.padding[0], c.out_height) * num_products(c.width, c.padding[1], c.out_width);
  return c.batch * tiles >= 32 && 16 * tiles <= products;
}

// The block of x and y with which Winograd's convolutions reorder nothing, and their neighbours nothing either.
std::int64_t winograd_block(const Conv& c) {
  return has_avx512() && c.channels % 16 == 0 && c.outputs % 16 == 0 ? 16 : kWinogradLanes;
}

using ForwardDesc = dnnl::convolution_forward::primitive_desc;
using DataDesc = dnnl::convolution_backward_data::primitive_desc;
using WeightDesc = dnnl::convolution_backward_weights::primitive_desc;
constexpr auto kDirect = dnnl::algorithm::convolution_direct;

ForwardDesc forward_desc(const Conv& c, const Shapes& s, Tag tag, bool has_bias) {
  dnnl::primitive_attr attributes = call_attributes();
  if (c.relu) attributes.set_post_ops(relu_post_ops());
  return {onednn_engine(), dnnl::prop_kind::forward_training, kDirect, s.image(s.x, tag),
          s.any_weights(s.computed), has_bias ? s.bias() : Desc(), s.image(s.y, tag), s.stride, s.dilation, s.padding, s.padding, attributes};
}

ForwardDesc forward_desc(const Conv& c, const Shapes& s, bool has_bias) {
  return forward_desc(c, s, image_tag(c, ConvKind::kForward), has_bias);
}

DataDesc data_desc(const Conv& c, const Shapes& s) {
  const Tag tag = image_tag(c, ConvKind::kBackwardData);
  return {onednn_engine(), kDirect, s.image(s.x, tag), s.any_weights(s.computed), s.image(s.y, tag), s.stride,
          s.dilation, s.padding, s.padding, forward_desc(c, s, tag, false), call_attributes()};
}

WeightDesc weight_desc(const Conv& c, const Shapes& s, bool has_bias) {
  const Tag tag = image_tag(c, ConvKind::kBackwardWeight);
  return {onednn_engine(), kDirect, s.image(s.x, tag), s.any_weights(DataType::f32),
          has_bias ? s.bias() : Desc(), s.image(s.y, tag), s.stride, s.dilation, s.padding, s.padding, forward_desc(c, s, tag, has_bias),
          call_attributes()};
}

OnednnCall::Slot x_slot(const Conv& c, const Shapes& s, int argument, const Desc& chosen, bool is_output) {
  return {argument, blocked_like(s.x, s.given, c.x_block, chosen), chosen, is_output,
          blocked_like(s.x, DataType::f32, c.x_block, chosen)};
}

OnednnCall::Slot y_slot(const Conv& c, const Shapes& s, int argument, const Desc& chosen, bool is_output) {
  return {argument, blocked_like(s.y, s.given, c.y_block, chosen), chosen, is_output,
          blocked_like(s.y, DataType::f32, c.y_block, chosen)};
}

OnednnCall::Slot w_slot(const Conv& c, const Shapes& s, const Desc& chosen) {
  return {DNNL_ARG_WEIGHTS, s.weights(array_type(c.is_bfloat16 && !c.has_float_weights)), chosen, false,
          s.weights(DataType::f32)};
}

OnednnCall make_forward(const Conv& c, bool has_bias) {
  const Shapes s(c, ConvKind::kForward);
  const auto pd = forward_desc(c, s, has_bias);
  std::vector<OnednnCall::Slot> slots{x_slot(c, s, DNNL_ARG_SRC, pd.src_desc(), false),
                                w_slot(c, s, pd.weights_desc()),
                                y_slot(c, s, DNNL_ARG_DST, pd.dst_desc(), true)};
  if (c.relu) slots.push_back(prelu_weight_slot(s.y.size()));
  if (has_bias) slots.push_back({DNNL_ARG_BIAS, s.bias(), s.bias(), false});
  return OnednnCall(dnnl::convolution_forward(pd), pd, std::move(slots));
}

OnednnCall make_backward_data(const Conv& c) {
  const Shapes s(c, ConvKind::kBackwardData);
  const auto pd = data_desc(c, s);
  return OnednnCall(dnnl::convolution_backward_data(pd), pd,
              {y_slot(c, s, DNNL_ARG_DIFF_DST, pd.diff_dst_desc(), false),
               w_slot(c, s, pd.weights_desc()),
               x_slot(c, s, DNNL_ARG_DIFF_SRC, pd.diff_src_desc(), true)});
}

OnednnCall make_backward_weight(const Conv& c, bool has_bias) {
  const Shapes s(c, ConvKind::kBackwardWeight);
  const auto pd = weight_desc(c, s, has_bias);
  std::vector<OnednnCall::Slot> slots{y_slot(c, s, DNNL_ARG_DIFF_DST, pd.diff_dst_desc(), false),
                                x_slot(c, s, DNNL_ARG_SRC, pd.src_desc(), false),
                                {DNNL_ARG_DIFF_WEIGHTS, s.weights(DataType::f32), pd.diff_weights_desc(), true}};
  if (has_bias) slots.push_back({DNNL_ARG_DIFF_BIAS, s.bias(), s.bias(), true});
  return OnednnCall(dnnl::convolution_backward_weights(pd), pd, std::move(slots));
}

// The weights of a convolution as they are, or rounded where neither oneDNN's reorder to bfloat16 nor anything else would.
class Weights {
 public:
  Weights(Conv* c, ConvKind kind, const void* w)
      : count_(std::size_t(c->outputs * (c->channels / c->groups) * c->kernel[0] * c->kernel[1])), w_(w),
        rounded_(c->has_float_weights && (computed_type(true) == DataType::f32 || is_winograd(*c, kind))
                     ? count_ * sizeof(Bfloat16) : 0) {
    if (!rounded_.data()) return;
    to_bfloat16(static_cast<const float*>(w), static_cast<Bfloat16*>(rounded_.data()), count_);
    c->has_float_weights = false;
  }
  const void* data() const { return rounded_.data() ? rounded_.data() : w_; }

 private:
  std::size_t count_;
  const void* w_;
  PoolBlock rounded_;
};

}  // namespace

void use_winograd(bool is_wanted) { wanted_winograd = is_wanted; }

std::optional<std::pair<std::int64_t, std::int64_t>> conv_formats(const Conv& c, ConvKind kind, bool has_bias) try {
  if (is_winograd(c, kind)) return std::pair{winograd_block(c), winograd_block(c)};
  const Shapes s(c, kind);
  Desc x, y;
  if (kind == ConvKind::kForward) {
    const auto pd = forward_desc(c, s, has_bias);
    x = pd.src_desc(), y = pd.dst_desc();
  } else if (kind == ConvKind::kBackwardData) {
    const auto pd = data_desc(c, s);
    x = pd.diff_src_desc(), y = pd.diff_dst_desc();
  } else {
    const auto pd = weight_desc(c, s, has_bias);
    x = pd.src_desc(), y = pd.diff_dst_desc();
  }
  const auto or_plain = [](std::int64_t block) { return block ? block : 1; };
  return std::pair{or_plain(block_of(s.x, x)), or_plain(block_of(s.y, y))};
} catch (const dnnl::error& error) {
  if (error.status != dnnl_unimplemented) throw;
  return {};
}

bool conv_forward(Conv c, const void* x, const void* w, const float* b, void* y) {
  const Weights weights(&c, ConvKind::kForward, w);
  if (is_winograd(c, ConvKind::kForward)) return winograd_forward(c, x, weights.data(), b, y);
  const auto call = cached_call(key_of(ConvKind::kForward, c, b), [&] { return make_forward(c, b); });
  if (!call) return false;
  if (c.relu) call->run({x, weights.data(), y, &kPreluWeight, b});
  else call->run({x, weights.data(), y, b});
  return true;
}

bool conv_backward_data(Conv c, const void* dy, const void* w, void* dx) {
  const Weights weights(&c, ConvKind::kBackwardData, w);
  if (is_winograd(c, ConvKind::kBackwardData)) return winograd_backward_data(c, dy, weights.data(), dx);
  const auto call = cached_call(key_of(ConvKind::kBackwardData, c, false), [&] { return make_backward_data(c); });
  if (!call) return false;
  call->run({dy, weights.data(), dx});
  return true;
}

bool conv_backward_weight(const Conv& c, const void* dy, const void* x, float* dw, float* db) {
  if (is_winograd(c, ConvKind::kBackwardWeight)) return winograd_backward_weight(c, dy, x, dw, db);
  const auto call = cached_call(key_of(ConvKind::kBackwardWeight, c, db), [&] { return make_backward_weight(c, db); });
  if (!call) return false;
  call->run({dy, x, dw, db});
  return true;
}

#else

void use_winograd(bool) {}
std::optional<std::pair<std::int64_t, std::int64_t>> conv_formats(const Conv&, ConvKind, bool) { return {}; }
bool conv_forward(Conv, const void*, const void*, const float*, void*) { return false; }
bool conv_backward_data(Conv, const void*, const void*, void*) { return false; }
bool conv_backward_weight(const Conv&, const void*, const void*, float*, float*) { return false; }

#endif

}  // namespace singa_lite
