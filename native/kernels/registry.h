// SPDX-License-Identifier: Apache-2.0
// Kernels that Python finds by name: a file that defines one registers it, and no other file is edited.
//
// Note [registered kernel]: a kernel gets a Call, the arrays and attributes of a call in Python, and gives the Step that
// computes it, or an empty one if the call is not for it (another type, odd shapes): the caller then uses the numpy kernel.
// It must check all that it relies on. A Step copies what it needs, pointers included, and may run many times; it returns
// false where it does not support the values (an index out of range).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/bfloat16.h"
#include "kernels/widen.h"

namespace singa_lite {

using Shape = std::vector<std::int64_t>;

// One array of a call, as numpy describes it.
struct View {
  void* data = nullptr;
  char type = 0;  // numpy's character: f float32, e float16, E bfloat16, d float64, i int32, l int64, ? bool; 0 for others
  Shape shape;
  Shape strides;  // in bytes
  bool is_row_major = false;
  bool is_writeable = false;

  std::size_t size() const;
  int ndim() const { return int(shape.size()); }
  // Whether it is a row-major float32 array.
  bool is_floats() const { return type == 'f' && is_row_major; }
  float* floats() const { return static_cast<float*>(data); }
  // Whether it is a row-major bfloat16 array.
  bool is_bfloat16s() const { return type == 'E' && is_row_major; }
  Bfloat16* bfloat16s() const { return static_cast<Bfloat16*>(data); }
  // Whether it is either of these.
  bool is_operand() const { return is_floats() || is_bfloat16s(); }
  Operand operand() const { return {data, is_bfloat16s()}; }
};

struct Call {
  std::vector<View> inputs, outputs;
  std::map<std::string, std::vector<double>> attributes;  // numbers, flags and tuples of them; none of a text or None
  std::map<std::string, std::string> words{};             // the attributes that are text, or "" for None

  // Whether there are so many arrays, all row-major float32.
  bool are_floats(std::size_t num_inputs, std::size_t num_outputs) const;
  // Whether there are so many arrays, all row-major float32 or bfloat16.
  bool are_operands(std::size_t num_inputs, std::size_t num_outputs) const;
  // Whether there is a row-major array of each of these types (see View), in this order.
  bool has_arrays(const std::string& input_types, const std::string& output_types) const;
  // Whether these are its attributes, and each is one number.
  bool has_numbers(std::initializer_list<const char*> names) const;
  double number(const char* name) const { return attributes.at(name)[0]; }
  // The attributes as floats: first those of ``optional``, 0 where one is not given, then those of ``names`` (separated
  // by ", "). Nothing if others are given, one is not a number, or there are more than ``most``.
  template <std::size_t most>
  std::optional<std::array<float, most>> read_numbers(const char* names, std::initializer_list<const char*> optional = {}) const {
    std::array<float, most> numbers{};
    if (!read_numbers(names, optional, numbers.data(), most)) return {};
    return numbers;
  }
  bool read_numbers(const char* names, std::initializer_list<const char*> optional, float* to, std::size_t most) const;
};

using Step = std::function<bool()>;
using Prepare = std::function<Step(const Call&)>;

// All that are registered, by name.
const std::map<std::string, Prepare>& registered_kernels();

// A static object of this type registers a kernel when the module is loaded.
struct Registration {
  Registration(const char* name, Prepare prepare);
};

}  // namespace singa_lite
