// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.h"

namespace singa_lite {

NcclLibrary::NcclLibrary(const std::vector<std::string>& names) try : library(names) {
  const auto get = [this](auto& function, const char* symbol) {
    function = library.get<std::remove_pointer_t<std::remove_reference_t<decltype(function)>>>(symbol);
  };
  Status (*get_version)(int*);
  get(get_version, "ncclGetVersion");
  get(get_error_string_, "ncclGetErrorString");
  if (get_version(&version) != kNcclSuccess || version < kNcclOldest)
    throw std::runtime_error(library.name() + " is version " + std::to_string(version) + " (22809 is 2.28.9), but " +
                             "2.14 or later is needed");
  get(get_last_error_, "ncclGetLastError");
  get(get_unique_id, "ncclGetUniqueId");
  get(init, "ncclCommInitRankConfig");
  get(get_async_error, "ncclCommGetAsyncError");
  get(finalize, "ncclCommFinalize");
  get(destroy, "ncclCommDestroy");
  get(abort, "ncclCommAbort");
  get(all_reduce, "ncclAllReduce");
  get(reduce, "ncclReduce");
  get(broadcast, "ncclBroadcast");
  get(all_gather, "ncclAllGather");
  get(reduce_scatter, "ncclReduceScatter");
  get(group_start, "ncclGroupStart");
  get(group_end, "ncclGroupEnd");
  get(send, "ncclSend");
  get(receive, "ncclRecv");
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
