// SPDX-License-Identifier: Apache-2.0
#include "kernels/registry.h"

#include <algorithm>

namespace singa_lite {
namespace {

std::map<std::string, Prepare>& kernels() {
  static std::map<std::string, Prepare> all;  // made at the first use, which may come before other static objects
  return all;
}

}  // namespace

std::size_t View::size() const {
  std::size_t all = 1;
  for (const std::int64_t size : shape) all *= std::size_t(size);
  return all;
}

bool Call::are_floats(std::size_t num_inputs, std::size_t num_outputs) const {
  const auto is_floats = [](const View& view) { return view.is_floats(); };
  return are_operands(num_inputs, num_outputs) && std::all_of(inputs.begin(), inputs.end(), is_floats) &&
         std::all_of(outputs.begin(), outputs.end(), is_floats);
}

bool Call::are_operands(std::size_t num_inputs, std::size_t num_outputs) const {
  if (inputs.size() != num_inputs || outputs.size() != num_outputs) return false;
  for (const View& view : inputs)
    if (!view.is_operand()) return false;
  for (const View& view : outputs)
    if (!view.is_operand() || !view.is_writeable) return false;
  return true;
}

bool Call::has_arrays(const std::string& input_types, const std::string& output_types) const {
  const auto fit = [](const std::vector<View>& views, const std::string& types, bool is_written) {
    return views.size() == types.size() && std::equal(views.begin(), views.end(), types.begin(), [&](const View& view, char type) {
             return view.type == type && view.is_row_major && (view.is_writeable || !is_written);
           });
  };
  return fit(inputs, input_types, false) && fit(outputs, output_types, true);
}

bool Call::has_numbers(std::initializer_list<const char*> names) const {
  if (attributes.size() != names.size()) return false;
  for (const char* name : names) {
    const auto found = attributes.find(name);
    if (found == attributes.end() || found->second.size() != 1) return false;
  }
  return true;
}

bool Call::read_numbers(const char* names_, std::initializer_list<const char*> optional, float* to,
                        std::size_t most) const {
  std::size_t found = 0, at = 0;
  const auto read = [&](const std::string& name, bool must) {
    const auto given = attributes.find(name);
    if (at == most || (given == attributes.end() ? must : given->second.size() != 1)) return false;
    to[at++] = given == attributes.end() ? 0 : float(given->second[0]);
    found += given != attributes.end();
    return true;
  };
  for (const char* name : optional)
    if (!read(name, false)) return false;
  const std::string names = names_;
  for (std::size_t start = 0; start < names.size();) {
    const std::size_t end = std::min(names.find(", ", start), names.size());
    if (!read(names.substr(start, end - start), true)) return false;
    start = end + 2;
  }
  return attributes.size() == found;
}

const std::map<std::string, Prepare>& registered_kernels() { return kernels(); }

Registration::Registration(const char* name, Prepare prepare) { kernels().emplace(name, std::move(prepare)); }

}  // namespace singa_lite
