// SPDX-License-Identifier: Apache-2.0
// NCCL (libnccl.so.2), opened at run time: own prototypes of the functions used, and the version gate.
#pragma once

#include <climits>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/library.h"

namespace singa_lite {

using NcclHandle = struct NcclHandleOpaque*;

struct NcclId {
  char bytes[128];
};

// The fields of NCCL 2.14; later libraries take what is missing from their defaults.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  // or 1
  int unset = INT_MIN;  // where later versions keep their next field
};

// The values of NCCL's interface that are used here.
constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
constexpr int kNcclOldest = 21400;  // the first whose calls need not block, so that each can have a deadline

struct NcclLibrary {
  using Status = int;

  // Throws CommError: not found, older than 2.14, or incomplete.
  explicit NcclLibrary(const std::vector<std::string>& names);

  // Throws CommError "where: NCCL status, its text" unless `status` is success or in progress.
  void check(Status status, const std::string& where) const;
  std::string text_of(Status status) const;

  Library library;
  int version = 0;  // 22809 is 2.28.9
  Status (*get_unique_id)(NcclId*);
  Status (*init)(NcclHandle*, int size, NcclId, int rank, NcclConfig*);
  Status (*get_async_error)(NcclHandle, Status*);
  Status (*finalize)(NcclHandle);
  Status (*destroy)(NcclHandle);
  Status (*abort)(NcclHandle);
  Status (*all_reduce)(const void*, void*, std::size_t, int dtype, int op, NcclHandle, void* stream);
  Status (*reduce)(const void*, void*, std::size_t, int dtype, int op, int root, NcclHandle, void* stream);
  Status (*broadcast)(const void*, void*, std::size_t, int dtype, int root, NcclHandle, void* stream);
  Status (*all_gather)(const void*, void*, std::size_t, int dtype, NcclHandle, void* stream);
  Status (*reduce_scatter)(const void*, void*, std::size_t, int dtype, int op, NcclHandle, void* stream);
  Status (*group_start)();
  Status (*group_end)();
  Status (*send)(const void*, std::size_t, int dtype, int peer, NcclHandle, void* stream);
  Status (*receive)(void*, std::size_t, int dtype, int peer, NcclHandle, void* stream);

 private:
  const char* (*get_error_string_)(Status);
  const char* (*get_last_error_)(NcclHandle);
};

}  // namespace singa_lite
