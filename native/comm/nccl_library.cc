// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.h"

namespace singa_lite {

NcclLibrary::NcclLibrary(const std::vector<std::string>& names) try : library(names) {
  Status (*get_version)(int*);
  library.get(get_version, "ncclGetVersion");
  library.get(get_error_string_, "ncclGetErrorString");
  if (get_version(&version) != kNcclSuccess || version < kNcclOldest)
    throw std::runtime_error(library.name() + " is version " + std::to_string(version) + " (22809 is 2.28.9), but " +
                             "2.14 or later is needed");
  library.get(get_last_error_, "ncclGetLastError");
  library.get(get_unique_id, "ncclGetUniqueId");
  library.get(init, "ncclCommInitRankConfig");
  library.get(get_async_error, "ncclCommGetAsyncError");
  library.get(finalize, "ncclCommFinalize");
  library.get(destroy, "ncclCommDestroy");
  library.get(abort, "ncclCommAbort");
  library.get(all_reduce, "ncclAllReduce");
  library.get(reduce, "ncclReduce");
  library.get(broadcast, "ncclBroadcast");
  library.get(all_gather, "ncclAllGather");
  library.get(reduce_scatter, "ncclReduceScatter");
  library.get(group_start, "ncclGroupStart");
  library.get(group_end, "ncclGroupEnd");
  library.get(send, "ncclSend");
  library.get(receive, "ncclRecv");
} catch (const std::runtime_error& error) {
  throw CommError(std::string("NCCL cannot be used: ") + error.what());
}

void NcclLibrary::check(Status status, const std::string& where) const {
  if (status != kNcclSuccess && status != kNcclInProgress) throw CommError(where + ": " + text_of(status));
}

std::string NcclLibrary::text_of(Status status) const {
  std::string text = "NCCL failed: " + std::string(get_error_string_(status));
  const char* last = get_last_error_(nullptr);  // the process's last
  return last != nullptr && *last != 0 ? text + " (" + last + ")" : text;
}

}  // namespace singa_lite
