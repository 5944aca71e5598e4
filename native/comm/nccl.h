// SPDX-License-Identifier: Apache-2.0
// Collectives on GPU memory over NCCL: pointers, counts and streams; neither Python nor cupy.
//
// Note [NCCL order]: a collective runs on this communicator's own stream. An event on the caller's stream holds it
// back until its input is written; an event behind it holds back the stream that calls wait(). The host waits for
// neither. It only waits (microseconds) until NCCL has put the collective on the stream, since NCCL's calls do not
// block and nothing may be recorded behind them before.
//
// Note [NCCL failure]: a thread checks every 5 ms, while something is in flight, whether NCCL reports an error, a
// peer of this host has ended, or the oldest collective has been running for longer than its time-out; it then
// aborts NCCL, which frees the streams, and every later call throws the reason. A time-out counts from when the
// input was written and all earlier collectives had ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/forks.h"
#include "comm/nccl_cuda.h"
#include "comm/nccl_library.h"
#include "comm/peers.h"
#include "comm/types.h"

namespace singa_lite {

constexpr int kUnknownDevice = -1;
constexpr double kLeaveS = 10.0;  // NCCL's end may wait for peers that are gone

struct NcclRequest {
  Kind kind;
  ReduceOp op;
  DType dtype;
  int root;
  const void* in;
  void* out;
  std::size_t count;  // elements of `in`; of one rank's block where has_blocks(kind)
  std::string_view name;
  int device;  // whose memory `in` is; kUnknownDevice: the driver is asked
};

// A collective that was started, or a graph that is watched.
struct NcclOp {
  explicit NcclOp(const std::shared_ptr<const Driver>& driver) : ready(driver), ended(driver) {}
  std::string label() const;  // its number, name and content, for errors

  bool is_graph = false;
  Kind kind{};
  ReduceOp op{};
  DType dtype{};
  std::size_t count = 0;
  std::uint64_t sequence = 0;
  std::string name;
  Event ready;  // its input is written
  Event ended;
  double running_since_s = 0;
  bool is_captured = false;  // part of a CUDA graph: it runs when that is launched, and is not watched
  std::atomic<bool> has_ended{false};  // so that its arrays need not be kept here
  std::atomic<bool> was_aborted{false};  // before it ended by itself; set before has_ended
};

class NcclCommunicator {
 public:
  // Returns once every rank has joined. `shown_rank`: in texts, that of the world.
  // `peers`: (shown rank, process id) of the other ranks of this host. `parent`: a
  // communicator of more ranks, whose stream is used, so that the two never run at once. `is_blocking`: NCCL's calls
  // return when they have done their part, sooner, but the start and the making of connections have no deadline.
  // `interrupt` is called now and then and may throw. Throws CommError.
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<const Driver> driver, const NcclId& id,
                   int rank, int shown_rank, int size, int device, double timeout_s, const std::vector<std::pair<int, int>>& peers,
                   const NcclCommunicator* parent, bool is_blocking, const std::function<void()>& interrupt);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Throws CommError: broken or closed, memory of another GPU, or NCCL returns an error.
  std::shared_ptr<NcclOp> start(const NcclRequest& request, CudaStream stream);
  // Holds `stream` back until `op` has ended. Throws CommError if this communicator is broken.
  void wait(const NcclOp& op, CudaStream stream);
  bool is_done(NcclOp& op);
  // Around the launch of a graph, on its stream: the time-out counts from when the stream has reached it.
  void begin_graph(CudaStream stream, const std::string& name);
  void end_graph(CudaStream stream);
  // Whether a collective may be started: not after a failure or close(), nor in a forked child.
  bool is_usable() const { return is_usable_ && !is_forked(); }
  void check();  // throws CommError unless this communicator is usable
  // Throws the CommError of what has failed, unless this communicator is closed.
  void check_failure();
  // Ends what is in flight and leaves, within `limit_s`; aborts if a peer is gone or that does not succeed. Nothing in
  // a forked child.
  void close(double limit_s = kLeaveS);
  void abort(const std::string& reason);
  bool is_forked() const { return forks_ != forks_so_far(); }

 private:
  std::string where(const std::string& label) const { return "rank " + std::to_string(shown_rank_) + ": " + label; }
  std::shared_ptr<NcclOp> next_op(std::string_view name);
  void give(const NcclRequest& request, NcclOp& op, CudaStream stream);
  void keep(std::shared_ptr<NcclOp> op);
  NcclLibrary::Status call_nccl(const NcclRequest& request);
  NcclLibrary::Status all_to_all(const NcclRequest& request);
  void poll_until_done(const std::function<std::string()>& label, double limit_s, const std::function<void()>& interrupt = {});
  NcclLibrary::Status state();
  void watch_all();
  std::string trouble();
  std::string dead_peer();
  void fail(const std::string& text);
  void leave(NcclLibrary::Status (*how)(NcclHandle));

  const std::shared_ptr<const NcclLibrary> library_;
  const std::shared_ptr<const Driver> driver_;
  const int rank_, size_, device_;
  const int shown_rank_;  // in the world, for texts
  const double timeout_s_;
  const std::uint64_t forks_ = forks_so_far();
  CudaContext context_;
  std::shared_ptr<Stream> stream_;
  std::uint64_t sequence_ = 0;
  std::shared_ptr<NcclOp> graph_;  // between begin_graph and end_graph, which the caller keeps together
  // Ops that nobody holds any more, to be used again for their events.
  struct Pool {
    std::mutex mutex;
    std::vector<std::unique_ptr<NcclOp>> free;
  };
  const std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();

  std::mutex nccl_;  // around every call of NCCL; none of them waits for a peer. Taken after mutex_ where both are.
  NcclHandle comm_ = nullptr;  // nullptr once destroyed or aborted

  std::mutex mutex_;  // of what follows
  std::condition_variable wake_;
  std::deque<std::shared_ptr<NcclOp>> in_flight_;
  std::string error_;
  bool is_closed_ = false, is_stopping_ = false;
  bool is_asleep_ = false;  // the watching thread: it sleeps until it is woken
  std::atomic<bool> is_usable_{true};  // neither broken nor closed
  const std::function<void()> interrupt_;

  std::mutex peers_mutex_;  // of what follows; the last to be taken
  Peers peers_;
  double dead_since_s_ = 0;
  std::thread watcher_;
};

}  // namespace singa_lite
