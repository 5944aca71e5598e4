// SPDX-License-Identifier: Apache-2.0
#include "kernels/onednn.h"

#include <cstring>
#include <map>
#include <mutex>

#include "kernels/elementwise.h"
#include "kernels/layout.h"
#include "kernels/memory.h"
#include "kernels/threads.h"

namespace singa_lite {

#ifdef SINGA_LITE_ONEDNN
namespace {

using Tag = dnnl::memory::format_tag;

constexpr std::size_t kMostCalls = 1024;  // a model has some hundred; inputs of ever new sizes must not fill memory

std::size_t rounded(std::size_t bytes) {
  return (bytes + MemoryPool::kAlignment - 1) / MemoryPool::kAlignment * MemoryPool::kAlignment;
}

dnnl::stream& stream() {
  thread_local dnnl::stream own(onednn_engine());
  return own;
}

bool has_isa(dnnl::cpu_isa wanted) {
  return (int(dnnl::get_effective_cpu_isa()) & int(wanted)) == int(wanted);
}

// See Note [slow reorders].
bool are_reorders_slow() {
  static const bool are = !has_avx512() && !has_isa(dnnl::cpu_isa::avx2_vnni_2);
  return are;
}

constexpr std::size_t kPartBytes = 1 << 20;  // takes much longer than to start two parallel regions

// How many parts of the first axis have these two formats, each in the same bytes of the array; 0 if they have none, or it is
// not worth it.
std::int64_t count_parts(const dnnl::memory::desc& plain, const dnnl::memory::desc& chosen) {
  if (plain.get_data_type() != chosen.get_data_type() || plain.get_size() != chosen.get_size()) return 0;
  std::int64_t rows = 1, elements = 1;  // rows of a block
  for (const auto size : chosen.get_dims()) elements *= size;
  const auto sizes = chosen.get_inner_blks(), axes = chosen.get_inner_idxs();
  for (std::size_t i = 0; i < sizes.size(); ++i)
    if (axes[i] == 0) rows *= sizes[i];
  const std::int64_t blocks = chosen.get_dims()[0] / rows;
  if (plain.get_strides()[0] * rows * blocks != elements || chosen.get_strides()[0] * blocks != elements) return 0;
  std::int64_t parts = blocks;
  while (parts > 1 && (blocks % parts || chosen.get_size() / std::size_t(parts) < kPartBytes)) --parts;
  return parts > 1 ? parts : 0;
}

dnnl::memory::desc part_of(const dnnl::memory::desc& whole, std::int64_t parts) {
  auto dims = whole.get_dims();
  dims[0] /= parts;
  return whole.submemory_desc(dims, Dims(dims.size(), 0));
}

float* floats_at(const dnnl::memory& memory) { return static_cast<float*>(memory.get_data_handle()); }
std::size_t num_floats(const dnnl::memory& memory) { return memory.get_desc().get_size() / sizeof(float); }

}  // namespace

const dnnl::engine& onednn_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

bool has_avx512() { return has_isa(dnnl::cpu_isa::avx512_core); }

DataType computed_type(bool is_bfloat16) {
  static const bool is_fast = [] {
    const bool is_without_tiles = has_isa(dnnl::cpu_isa::avx512_core_fp16) && !has_isa(dnnl::cpu_isa::avx512_core_amx);
    return has_isa(dnnl::cpu_isa::avx512_core_bf16) && !is_without_tiles;
  }();
  return is_bfloat16 && is_fast ? DataType::bf16 : DataType::f32;
}

OnednnCall::OnednnCall(const dnnl::primitive& primitive, std::vector<Slot> slots, const dnnl::memory::desc& scratchpad)
    : primitive_(primitive), slots_(std::move(slots)), conversions_(slots_.size()), scratchpad_(scratchpad),
      scratch_bytes_(rounded(scratchpad.get_size())) {
  const dnnl::engine& engine = onednn_engine();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    Conversion& conversion = conversions_[i];
    conversion.is_widened = are_reorders_slow() && slot.plain.get_data_type() != slot.chosen.get_data_type();
    if (conversion.is_widened) scratch_bytes_ += rounded(slot.widened.get_size());
    const auto& plain = conversion.is_widened ? slot.widened : slot.plain;
    if (plain == slot.chosen) continue;
    conversion.from = slot.is_output ? slot.chosen : plain;
    conversion.to = slot.is_output ? plain : slot.chosen;
    if (slot.is_output && !conversion.is_widened) conversion.parts = count_parts(plain, slot.chosen);
    if (conversion.parts) {
      conversion.from = part_of(conversion.from, conversion.parts);
      conversion.to = part_of(conversion.to, conversion.parts);
    }
    conversion.reorder = dnnl::reorder(dnnl::reorder::primitive_desc(engine, conversion.from, engine, conversion.to));
    scratch_bytes_ += rounded((slot.is_output ? conversion.from : conversion.to).get_size());
  }
}

void OnednnCall::run(const std::vector<const void*>& arrays) const {
  char* space = scratch_bytes_ ? static_cast<char*>(thread_scratch(scratch_bytes_)) : nullptr;
  const auto in_scratch = [&](const dnnl::memory::desc& desc) {
    char* const start = space;
    space += rounded(desc.get_size());
    return dnnl::memory(desc, onednn_engine(), start);
  };
  std::unordered_map<int, dnnl::memory> arguments{{DNNL_ARG_SCRATCHPAD, in_scratch(scratchpad_)}};
  std::vector<dnnl::memory> plain(slots_.size());  // the callers' arrays, or where they are widened
  note_parallel_region(num_threads());
  const SignalsBlocked blocked;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const Conversion& conversion = conversions_[i];
    void* const array = const_cast<void*>(arrays[i]);
    plain[i] = conversion.is_widened ? in_scratch(slot.widened) : dnnl::memory(slot.plain, onednn_engine(), array);
    dnnl::memory chosen = conversion.parts     ? dnnl::memory(slot.chosen, onednn_engine(), array)
                          : conversion.reorder ? in_scratch(slot.chosen)
                                               : plain[i];
    arguments.emplace(slot.arg, chosen);
    if (slot.is_output) continue;
    if (conversion.is_widened)
      from_bfloat16(static_cast<const Bfloat16*>(arrays[i]), floats_at(plain[i]), num_floats(plain[i]));
    if (conversion.reorder) conversion.reorder.execute(stream(), plain[i], chosen);
  }
  primitive_.execute(stream(), arguments);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Conversion& conversion = conversions_[i];
    if (!slots_[i].is_output) continue;
    void* const array = const_cast<void*>(arrays[i]);
    if (conversion.parts) put_in_order(conversion, array, in_scratch(conversion.from));
    else if (conversion.reorder) conversion.reorder.execute(stream(), arguments.at(slots_[i].arg), plain[i]);
    if (conversion.is_widened) to_bfloat16(floats_at(plain[i]), static_cast<Bfloat16*>(array), num_floats(plain[i]));
  }
}

void OnednnCall::put_in_order(const Conversion& conversion, void* array, dnnl::memory part) {
  const std::size_t bytes = conversion.from.get_size();
  char *ordered = static_cast<char*>(array), *const copy = static_cast<char*>(part.get_data_handle());
  for (std::int64_t i = 0; i < conversion.parts; ++i, ordered += bytes) {
    dnnl::memory to(conversion.to, onednn_engine(), ordered);
    parallel_for(bytes, 1, [=](std::size_t first, std::size_t last) { std::memcpy(copy + first, ordered + first, last - first); });
    conversion.reorder.execute(stream(), part, to);
  }
}

dnnl::primitive_attr call_attributes() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

dnnl::post_ops relu_post_ops() {
  dnnl::post_ops after;
  if (has_isa(dnnl::cpu_isa::avx2)) after.append_prelu(0);
  else after.append_eltwise(dnnl::algorithm::eltwise_relu, 0, 0);
  return after;
}

OnednnCall::Slot prelu_weight_slot(std::size_t num_axes) {
  const Dims ones(num_axes, 1);
  const dnnl::memory::desc one(ones, DataType::f32, ones);
  return {DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_WEIGHTS, one, one, false};
}

std::shared_ptr<const OnednnCall> cached_call(CallKey key, const std::function<OnednnCall()>& make) {
  static std::mutex mutex;
  static std::map<CallKey, std::shared_ptr<const OnednnCall>> calls;
  // A child has the table as no thread was changing it. The pool, whose lock is taken below this one, comes first here:
  // fork() calls the last registered first.
  static const int registered =
      (memory_pool(), pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); }));
  static_cast<void>(registered);
  key.push_back(num_threads());  // a primitive splits its work when it is made
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = calls.find(key);
    if (found != calls.end()) return found->second;
  }
  std::shared_ptr<const OnednnCall> call;
  try {
    call = std::make_shared<const OnednnCall>(make());
  } catch (const dnnl::error& error) {
    if (error.status != dnnl_unimplemented) throw;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (calls.size() >= kMostCalls) calls.clear();
  calls.emplace(std::move(key), call);
  return call;
}

dnnl::memory::desc blocked(const Dims& dims, DataType type, std::int64_t block) {
  return {dims, type, block == 1 ? Tag::nchw : block == 8 ? Tag::nChw8c : block == 16 ? Tag::nChw16c : Tag::nhwc};
}

std::int64_t block_of(const Dims& dims, const dnnl::memory::desc& desc) {
  const std::int64_t channels = dims[1];
  const auto is = [&](Tag tag) { return desc == dnnl::memory::desc(dims, desc.get_data_type(), tag); };
  if (is(Tag::nchw)) return 1;
  for (const auto& [block, tag] : {std::pair{8, Tag::nChw8c}, std::pair{16, Tag::nChw16c}})
    if (channels % block == 0 && is(tag)) return block;
  return is(Tag::nhwc) ? channels : 0;
}

dnnl::memory::desc blocked_like(const Dims& dims, DataType type, std::int64_t block, const dnnl::memory::desc& desc) {
  return desc.get_data_type() == type && block_of(dims, desc) == block ? desc : blocked(dims, type, block);
}

bool reorder(const Image& image, const void* x, std::int64_t x_block, void* y, std::int64_t y_block) {
  constexpr std::int64_t kKind = 5;
  const Dims dims{image.batch, image.channels, image.height, image.width};
  const auto call = cached_call({kKind, dims[0], dims[1], dims[2], dims[3], x_block, y_block, image.is_bfloat16}, [&] {
    const DataType given = array_type(image.is_bfloat16), moved = are_reorders_slow() ? DataType::f32 : given;
    const auto from = blocked(dims, moved, x_block), to = blocked(dims, moved, y_block);
    const dnnl::engine& engine = onednn_engine();
    const dnnl::reorder::primitive_desc pd(engine, from, engine, to, call_attributes());
    return OnednnCall(dnnl::reorder(pd), pd,
                {{DNNL_ARG_FROM, blocked(dims, given, x_block), from, false, from},
                 {DNNL_ARG_TO, blocked(dims, given, y_block), to, true, to}});
  });
  if (!call) return false;
  call->run({x, y});
  return true;
}

#else

bool reorder(const Image&, const void*, std::int64_t, void*, std::int64_t) { return false; }

#endif

}  // namespace singa_lite
