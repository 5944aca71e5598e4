// SPDX-License-Identifier: Apache-2.0
// A world of forked processes: ranks must be processes, because the locks that show which are alive are theirs.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "comm/engine.h"
#include "common/error.h"

namespace singa_lite {

constexpr double kTimeoutS = 20;        // of a collective; the sanitizers are slow
constexpr unsigned kDeadlineS = 60;     // of a rank, which a signal then ends
constexpr int kKilled = -1;             // the exit status expected of a rank that kills itself

inline std::string new_rendezvous_id() {
  static int count = 0;
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

// Fork `size` ranks that run body(rank) and wait for all; fails unless each ends with the status expected of it.
inline void run_ranks(int size, const std::function<void(int)>& body, std::vector<int> expected = {}) {
  std::fflush(nullptr);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(fork());
    CHECK(ranks.back() >= 0);
    if (ranks.back() != 0) continue;
    alarm(kDeadlineS);
    try {
      body(rank);
    } catch (const std::exception& error) {
      FAIL("rank %d: unexpected: %s", rank, error.what());
    }
    std::exit(0);
  }
  expected.resize(std::size_t(size), 0);
  bool is_good = true;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    CHECK(waitpid(ranks[std::size_t(rank)], &status, 0) == ranks[std::size_t(rank)]);
    const int got = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status) == SIGKILL ? kKilled : -WTERMSIG(status);
    if (got != expected[std::size_t(rank)]) {
      std::fprintf(stderr, "rank %d of %d ended with %d, expected %d\n", rank, size, got, expected[std::size_t(rank)]);
      is_good = false;
    }
  }
  CHECK(is_good);
}

// Run body(engine, rank) on each rank of a gathered world.
inline void run_world(int size, const std::function<void(Engine&, int)>& body, std::vector<int> expected = {},
                      double timeout_s = kTimeoutS) {
  const std::string rendezvous_id = new_rendezvous_id();
  run_ranks(
      size,
      [&](int rank) {
        Engine engine(rendezvous_id, rank, size, timeout_s);
        engine.wait_for_all();
        body(engine, rank);
      },
      std::move(expected));
  CHECK(access(("/dev/shm/singa_lite-" + rendezvous_id).c_str(), F_OK) != 0);
}

inline void finish(Engine& engine, Op& op) {
  const double since_s = monotonic_s();
  while (!engine.wait(op, 0.1, -1, since_s)) {
  }
}

// The text of the CommError that body throws.
inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  }
  return "(no CommError was thrown)";
}

#define CHECK_SAYS(text, part)                                                                     \
  do {                                                                                             \
    const std::string text_ = (text), part_ = (part);                                              \
    if (text_.find(part_) == std::string::npos) FAIL("no '%s' in '%s'", part_.c_str(), text_.c_str()); \
  } while (false)

}  // namespace singa_lite
