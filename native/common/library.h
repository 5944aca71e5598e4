// SPDX-License-Identifier: Apache-2.0
// A shared library opened at run time, so that one build serves machines with and without it.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace singa_lite {

// Stays open for the life of the process: what it started cannot be unloaded safely.
class Library {
 public:
  // Opens the first of `names` (file names or paths) that the loader finds.
  // Throws std::runtime_error with the loader's reason for the last of them.
  explicit Library(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      name_ = name;
      if (handle_ != nullptr) return;
    }
    throw std::runtime_error(dlerror());
  }

  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // The file name it was opened by.
  const std::string& name() const { return name_; }

  // The function `symbol`; nullptr if the library has none (an older version).
  template <typename Function>
  Function* find(const char* symbol) const {
    return reinterpret_cast<Function*>(dlsym(handle_, symbol));
  }

  // Have `function` point to the function `symbol`. Throws std::runtime_error if the library has none.
  template <typename Function>
  void get(Function*& function, const char* symbol) const {
    function = find<Function>(symbol);
    if (function == nullptr) throw std::runtime_error(name_ + " has no function " + symbol);
  }

 private:
  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace singa_lite
