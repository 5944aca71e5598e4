// SPDX-License-Identifier: Apache-2.0
// The processes of this host that a collective depends on: has one of them ended?
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

namespace singa_lite {

// Peers are watched through their process descriptors (Linux 5.3); those that cannot be are taken to live.
class Peers {
 public:
  // (rank, process id) of each
  explicit Peers(const std::vector<std::pair<int, int>>& peers) {
    for (const auto& [rank, process] : peers) {
      const int descriptor = int(syscall(434 /* pidfd_open */, process, 0));
      if (descriptor >= 0) watched_.push_back({descriptor, POLLIN, 0});
      else if (errno == ESRCH) first_dead_ = describe(rank, process);
      if (descriptor >= 0) names_.push_back(describe(rank, process));
    }
  }
  ~Peers() {
    for (const pollfd& entry : watched_) close(entry.fd);
  }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // "rank 1 (process 4711)" of one that has ended, "" if all live.
  std::string dead() {
    if (first_dead_.empty() && poll(watched_.data(), watched_.size(), 0) > 0)
      for (std::size_t i = 0; i < watched_.size(); ++i)
        if (watched_[i].revents != 0) first_dead_ = names_[i];
    return first_dead_;
  }

 private:
  static std::string describe(int rank, int process) {
    return "rank " + std::to_string(rank) + " (process " + std::to_string(process) + ")";
  }

  std::vector<pollfd> watched_;
  std::vector<std::string> names_;
  std::string first_dead_;
};

}  // namespace singa_lite
