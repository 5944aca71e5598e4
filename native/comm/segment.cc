// SPDX-License-Identifier: Apache-2.0
#include "comm/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <new>

#include "common/error.h"

namespace singa_lite {
namespace {

constexpr std::uint64_t kMagic = 0x53494e47414c5404;  // "SINGALT", layout 4
constexpr std::size_t kPage = 4096;
constexpr double kPollS = 0.001;  // between checks of a world that ranks still join
constexpr double kCheckS = 0.05;  // between calls of the caller's check, which may need Python

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// See Note [locks].
struct flock lock_of(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

std::string reason() { return std::strerror(errno); }

void pause_s(double seconds) {
  timespec time{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
  nanosleep(&time, nullptr);
}

std::string megabytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MB", bytes / 1e6);
  return text;
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

}  // namespace

// The time-out of one wait, and the caller's check meanwhile.
class Segment::Wait {
 public:
  Wait(double timeout_s, const Check& check) : deadline_s_(monotonic_s() + timeout_s), check_(check) {}

  bool is_over() const { return monotonic_s() > deadline_s_; }

  // Sleep a little; returns why waiting is of no use any more, or "".
  std::string pause() {
    pause_s(kPollS);
    if (!check_ || monotonic_s() < next_check_s_) return "";
    next_check_s_ = monotonic_s() + kCheckS;
    return check_();
  }

 private:
  const double deadline_s_;
  double next_check_s_ = 0;
  const Check& check_;
};

double monotonic_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, double seconds) {
  timespec time{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

std::string list_of(const std::vector<int>& ranks, const NameOf& name_of) {
  std::string list, word;
  for (int rank : ranks) {
    const std::string name = name_of(rank), its_word = name.substr(0, name.rfind(' '));
    list += (list.empty() ? "" : ", ") + (its_word == word ? name.substr(word.size() + 1) : name);
    word = its_word;
  }
  return list;
}

bool AbortRecord::post(int who, const std::string& why) {
  std::uint32_t none = 0;
  if (!state.compare_exchange_strong(none, 1)) return false;
  rank = who;
  const std::size_t length = std::min(why.size(), sizeof(text) - 1);
  std::memcpy(text, why.data(), length);
  text[length] = '\0';
  state.store(2, std::memory_order_release);
  return true;
}

Segment::Segment(const std::string& rendezvous_id, int rank, int size, Payload payload, double timeout_s,
                 const Check& check)
    : name_("/singa_lite-" + rendezvous_id), rank_(rank), size_(size), contents_(std::move(payload)) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw CommError("shm: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                    " ranks is not possible; up to " + std::to_string(kMaxRanks) + " ranks may share a host");
  if (rendezvous_id.empty() || rendezvous_id.size() > 200 || rendezvous_id.find('/') != std::string::npos)
    throw CommError("shm: rendezvous id '" + rendezvous_id + "' must have 1 to 200 characters and no '/'");
  try {
    rank == 0 ? create() : attach(timeout_s, check);
  } catch (...) {
    unlink_if_ours();
    if (base_) munmap(base_, total_bytes_);
    if (fd_ >= 0) close(fd_);
    throw;
  }
}

Segment::~Segment() {
  leave();
  unlink_if_ours();
  munmap(base_, total_bytes_);
  close(fd_);
}

std::string Segment::where() const { return "shm: " + contents_.name_of(rank_) + ", /dev/shm" + name_ + ": "; }

void Segment::create() {
  fd_ = shm_open(name_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd_ < 0) {
    if (errno == EEXIST)
      throw CommError(where() + "exists already: another world has this rendezvous id, or an earlier one was killed; "
                      "remove the file or use a new rendezvous id");
    throw CommError(where() + "cannot be created: " + reason());
  }
  is_created_ = true;
  fchmod(fd_, 0600);  // whatever the umask says
  const std::size_t bytes =
      round_up(kPage + std::size_t(size_) * sizeof(RankBlock) + contents_.bytes, kPage);
  const int error = posix_fallocate(fd_, 0, off_t(bytes));  // real memory now, not a bus error later
  if (error == EFBIG)
    throw CommError(where() + "needs " + megabytes(double(bytes)) + ", and files of this process may not be as large; "
                    "raise the limit in the shell that starts it (ulimit -f unlimited)");
  if (error != 0) {
    struct statvfs space {};
    fstatvfs(fd_, &space);
    throw CommError(where() + "needs " + megabytes(double(bytes)) + ", and /dev/shm has " +
                    megabytes(double(space.f_bavail) * double(space.f_frsize)) + " free (" + std::strerror(error) +
                    "); free some there, or enlarge it (docker run --shm-size=256m, or mount -o remount,size=256m "
                    "/dev/shm)");
  }
  map(bytes);
  new (base_) Header();
  for (int r = 0; r < size_; ++r) new (&blocks_[r]) RankBlock();
  header().total_bytes = bytes;
  header().size = std::uint32_t(size_);
  take_rank();
  header().magic.store(kMagic, std::memory_order_release);
}

void Segment::attach(double timeout_s, const Check& check) {
  Wait wait(timeout_s, check);
  open_existing(timeout_s, wait);
  check_owner();
  struct stat status {};
  Header head{};
  for (;;) {  // rank 0 stores the magic last
    fstat(fd_, &status);
    if (std::size_t(status.st_size) >= kPage &&
        pread(fd_, static_cast<void*>(&head), offsetof(Header, all_attached), 0) > 0 &&
        head.magic.load(std::memory_order_relaxed) != 0)
      break;
    if (status.st_nlink == 0) throw CommError(where() + "rank 0 aborted making it; see its error");
    if (wait.is_over())
      throw CommError(where() + "was not filled by rank 0 within " + seconds_text(timeout_s) +
                      "; if no rank 0 runs, remove the file");
    if (const std::string why = wait.pause(); !why.empty()) throw CommError(where() + why);
  }
  if (head.magic.load(std::memory_order_relaxed) != kMagic || head.total_bytes != std::uint64_t(status.st_size))
    throw CommError(where() + "is not a segment of this version of singa_lite; use one version in all ranks");
  may_unlink_ = true;
  if (!is_alive(0)) throw CommError(where() + "belongs to a world whose rank 0 has died; use a new rendezvous id");
  if (head.size != std::uint32_t(size_)) {
    const std::string text = where() + "rank 0 says the world has " + std::to_string(head.size) + " ranks, rank " +
                             std::to_string(rank_) + " says " + std::to_string(size_) +
                             "; start all with the same number";
    map(std::size_t(status.st_size));
    post_abort(text);
    throw CommError(text);
  }
  map(std::size_t(status.st_size));
  take_rank();
}

void Segment::open_existing(double timeout_s, Wait& wait) {
  for (;;) {
    fd_ = shm_open(name_.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (fd_ >= 0) return;
    if (errno == EACCES) throw CommError(where() + "belongs to another user; use a new rendezvous id");
    if (errno != ENOENT) throw CommError(where() + "cannot be opened: " + reason());
    if (wait.is_over())
      throw CommError(where() + "was not made by rank 0 within " + seconds_text(timeout_s) +
                      "; check that rank 0 runs on this host, with the same rendezvous id");
    if (const std::string why = wait.pause(); !why.empty()) throw CommError(where() + why);
  }
}

void Segment::check_owner() const {
  struct stat status {};
  fstat(fd_, &status);
  if (status.st_uid != geteuid())
    throw CommError(where() + "belongs to another user (uid " + std::to_string(status.st_uid) +
                    "); use a new rendezvous id");
  if (status.st_mode & 077) throw CommError(where() + "is open to other users; use a new rendezvous id");
}

void Segment::map(std::size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (base == MAP_FAILED) throw CommError(where() + "cannot be mapped: " + reason());
  base_ = static_cast<char*>(base);
  total_bytes_ = bytes;
  blocks_ = reinterpret_cast<RankBlock*>(base_ + kPage);
  payload_ = base_ + kPage + sizeof(RankBlock) * std::size_t(size_);
}

// Note [locks]: a rank holds a POSIX record lock on byte `rank` of the file from here to its end. The kernel
// drops it when the process dies, before anyone collects it, and a forked child does not inherit it.
void Segment::take_rank() {
  struct flock lock = lock_of(rank_);
  if (fcntl(fd_, F_SETLK, &lock) != 0)
    throw CommError(where() + "rank " + std::to_string(rank_) + " is taken by process " +
                    std::to_string(block(rank_).pid.load()) + "; give every process its own rank");
  block(rank_).pid.store(getpid());
  block(rank_).presence.store(Presence::kAttached, std::memory_order_release);
}

bool Segment::is_alive(int peer) const {
  struct flock lock = lock_of(peer);
  if (fcntl(fd_, F_GETLK, &lock) != 0) return true;  // no verdict; the time-out remains
  return lock.l_type != F_UNLCK;
}

void Segment::wait_for_all(double timeout_s, const Check& check) {
  Wait wait(timeout_s, check);
  const auto fail = [&](const std::string& text) {
    post_abort(text);  // the others need not find out for themselves
    throw CommError(where() + text);
  };
  // rank 0, which alone stores all_attached, looks at the ranks
  while (rank_ == 0 || header().all_attached.load(std::memory_order_acquire) == 0) {
    if (const std::string text = abort_text(); !text.empty()) throw CommError(where() + text);
    std::vector<int> missing;
    for (int r = 0; r < size_; ++r) {
      const Presence presence = block(r).presence.load(std::memory_order_acquire);
      if (presence == Presence::kAbsent) missing.push_back(r);
      const bool is_gone =
          presence == Presence::kClosed || (presence == Presence::kAttached && r != rank_ && !is_alive(r));
      if (is_gone && header().all_attached.load(std::memory_order_acquire) == 0 && abort_text().empty())
        fail(contents_.name_of(r) + " (process " + std::to_string(block(r).pid.load()) +
             ") ended before all ranks were there");
    }
    if (missing.empty() && rank_ == 0) {
      unlink_if_ours();
      header().all_attached.store(1, std::memory_order_release);
      break;
    }
    if (wait.is_over())
      fail("waited " + seconds_text(timeout_s) + " for " + list_of(missing, contents_.name_of) +
           " to start; check that all ranks run on this host, with the same rendezvous id");
    const std::string why = wait.pause();
    if (!why.empty() && header().all_attached.load(std::memory_order_acquire) == 0) fail(why);
  }
}

// The name goes once all are attached, or when a rank fails before that and it made the file or its maker is dead.
void Segment::unlink_if_ours() {
  if (fd_ < 0) return;
  if (!is_created_ && (!may_unlink_ || is_alive(0))) return;
  struct stat ours {}, named {};
  // By name, not by shm_open: closing a second descriptor would drop this process's locks, see Note [locks].
  if (fstat(fd_, &ours) != 0 || stat(("/dev/shm" + name_).c_str(), &named) != 0) return;
  if (ours.st_ino == named.st_ino && ours.st_dev == named.st_dev) shm_unlink(name_.c_str());
}

bool Segment::post_abort(const std::string& text) { return header().abort.post(rank_, text); }

std::size_t Segment::flight_at(const char* memory, std::size_t bytes) {
  if (bytes < sizeof(Header)) return 0;
  const Header& head = *reinterpret_cast<const Header*>(memory);
  return head.magic.load(std::memory_order_acquire) == kMagic ? std::size_t(head.flight_at) : 0;
}

std::string Segment::abort_text() const {
  const AbortRecord& record = header().abort;
  return record.is_posted() ? contents_.name_of(record.rank) + " aborted: " + record.why() : "";
}

void Segment::leave() { block(rank_).presence.store(Presence::kClosed, std::memory_order_release); }

}  // namespace singa_lite
