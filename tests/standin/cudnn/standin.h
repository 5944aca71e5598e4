// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcudnn.so.9 on host memory, for tests alone: the calls singa_lite uses, computed by their definition
// in double, as strict about descriptors as the real library. Arguments are checked at the call, numbers are computed by
// the stream, one of the stand-in libcuda's. tests/devices.py compiles the folder, a file a family;
// tests/backend/test_cudnn.py drives it.
//
// The environment injects faults: STANDIN_CUDNN_VERSION is the version told, STANDIN_CUDNN_FAIL names a call that
// fails, STANDIN_CUDNN_MATH the only arithmetic it proposes. -DcudnnName=other leaves out a function.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace standin {

enum Status { kSuccess, kBadParam = 2000, kMisaligned = 2003, kTooSmall = 2006, kNotSupported = 3000 };
enum Kind { kHandle, kTensor, kFilter, kConvolution };

struct Object {
  int kind;
  int dtype = -1, shape[4] = {};
  int padding[2] = {}, stride[2] = {}, dilation[2] = {}, compute = -1, groups = 1, math = 0;
  void* stream = nullptr;
  int layout = 0;
};

// What tests ask for. Defined in one file: several stand-ins in a process must not share them.
extern std::map<std::string, int> calls;
extern std::string reason;
extern int live;

int fail(int status, const std::string& why);
int counted(const char* name);
int create(Object** object, int kind, const char* name);
int destroy(Object* object);

std::size_t size_of(int dtype);
std::size_t count(const Object& o);
// Values in the order of NCHW, whatever the layout in memory.
std::vector<double> read(const Object& o, const void* data);
void write(const Object& o, const std::vector<double>& values, void* data);
// alpha and beta, which are of the host: read at the call.
struct Factors {
  double alpha, beta;
};
Factors factors(int dtype, const void* alpha, const void* beta);  // beside data of this dtype
void blend(const Object& o, std::vector<double>& values, const Factors& factors, void* data);
// Gives the handle's stream work to do.
int start(const Object* handle, const std::function<void()>& work);

}  // namespace standin

using standin::Object;
