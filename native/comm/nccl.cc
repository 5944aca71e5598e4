// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "comm/names.h"
#include "common/signals.h"

namespace singa_lite {

namespace {

constexpr double kPollS = 0.005;      // how soon an error is noticed; each check costs some microseconds
constexpr int kIdleLooks = 100;       // in a row that found nothing in flight; a step's collectives rarely wake the thread
constexpr double kGraceS = 1.0;       // for what a peer gave before it ended
constexpr int kSpins = 1000;          // NCCL mostly takes less than this to put a collective on the stream
constexpr int kDTypes[] = {6, 7, 8, 2, 4, 9, 1};  // ncclFloat16, 32, 64, ncclInt32, 64, ncclBfloat16, ncclUint8
constexpr int kOps[] = {0, 4, 2, 3, 0};     // ncclSum, Avg, Max, Min for each ReduceOp

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string seconds(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  return (text.back() == '.' ? text.substr(0, text.size() - 1) : text) + " s";
}

}  // namespace

std::string NcclOp::label() const {
  if (is_graph) return name;
  return std::string(name_of(kind)) + " #" + std::to_string(sequence) + " '" + shortened(name) + "' (" + name_of(dtype) + "[" +
         std::to_string(count) + "]" + (op == ReduceOp::kNone ? ")" : std::string(", ") + name_of(op) + ")");
}

// ---- the start ----------------------------------------------------------------------------------------

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<const Driver> driver,
                                   const NcclId& id, int rank, int shown_rank, int size, int device, double timeout_s,
                                   const std::vector<std::pair<int, int>>& peers, const NcclCommunicator* parent,
                                   bool is_blocking, const std::function<void()>& interrupt)
    : library_(std::move(library)),
      driver_(std::move(driver)),
      rank_(rank),
      size_(size),
      device_(device),
      shown_rank_(shown_rank),
      timeout_s_(timeout_s),
      context_(driver_->primary_context(device)),
      interrupt_(interrupt),
      peers_(peers) {
  ContextScope scope(*driver_, context_);
  stream_ = parent != nullptr ? parent->stream_ : std::make_shared<Stream>(driver_);
  NcclConfig config;
  config.blocking = is_blocking;
  try {
    library_->check(library_->init(&comm_, size_, id, rank_, &config), where("NCCL's start"));
    poll_until_done([] { return "NCCL's start"; }, timeout_s_, interrupt);
    const SignalsBlocked blocked;  // the thread inherits it
    watcher_ = std::thread([this] { watch_all(); });
  } catch (...) {
    leave(library_->abort);
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { close(); }

// ---- collectives --------------------------------------------------------------------------------------

std::shared_ptr<NcclOp> NcclCommunicator::start(const NcclRequest& request, CudaStream stream) {
  check();
  ContextScope scope(*driver_, context_);
  std::shared_ptr<NcclOp> op = next_op(request.name);
  op->kind = request.kind;
  op->op = request.op;
  op->dtype = request.dtype;
  op->count = request.count;
  op->sequence = sequence_;
  const bool is_known = request.device != kUnknownDevice && request.in != nullptr;  // an empty array may have no memory
  const int device = is_known ? request.device : driver_->device_of(request.in);
  if (device != device_)
    throw CommError(where(op->label()) + ": the array lives on GPU " + std::to_string(device) +
                    ", but this rank's communicator drives GPU " + std::to_string(device_));
  ++sequence_;
  try {
    give(request, *op, stream);
  } catch (const CommError& error) {
    fail(error.what());
  } catch (const std::runtime_error& error) {
    fail(where(op->label()) + ": " + error.what());
  } catch (...) {  // Ctrl-C, or no memory
    fail(where(op->label()) + ": interrupted");
    throw;
  }
  check();
  if (op->is_captured) op->has_ended = true;
  else keep(op);
  return op;
}

// Puts the collective on this communicator's stream, behind its input and before its end's event.
void NcclCommunicator::give(const NcclRequest& request, NcclOp& op, CudaStream stream) {
  op.is_captured = driver_->is_capturing(stream);
  driver_->record(op.ready.get(), stream);
  driver_->wait(stream_->get(), op.ready.get());
  if (request.count > 0) {
    const NcclLibrary::Status status = call_nccl(request);
    if (status == kNcclInProgress) poll_until_done([&] { return op.label(); }, timeout_s_, interrupt_);
    else if (status != kNcclSuccess) library_->check(status, where(op.label()));
  }
  driver_->record(op.ended.get(), stream_->get());
}

// Gives one collective to NCCL: success if it is on the stream, or in progress.
NcclLibrary::Status NcclCommunicator::call_nccl(const NcclRequest& request) {
  const auto& [kind, op, dtype, root, in, out, count, name, device] = request;
  const int type = kDTypes[std::size_t(dtype)], operation = kOps[std::size_t(op)];
  void* const stream = stream_->get();
  std::lock_guard lock(nccl_);
  if (comm_ == nullptr) return kNcclSuccess;  // aborted just now; the caller's check() says why
  switch (kind) {
    case Kind::kAllReduce: return library_->all_reduce(in, out, count, type, operation, comm_, stream);
    case Kind::kReduce:
      return library_->reduce(in, rank_ == root ? out : nullptr, count, type, operation, root, comm_, stream);
    case Kind::kBroadcast: return library_->broadcast(in, out, count, type, root, comm_, stream);
    case Kind::kAllGather: return library_->all_gather(in, out, count, type, comm_, stream);
    case Kind::kReduceScatter: return library_->reduce_scatter(in, out, count, type, operation, comm_, stream);
    case Kind::kAllToAll: return all_to_all(request);
  }
  return kNcclSuccess;  // there is no other kind
}

// A send to every rank and a receive from it, as one group: ncclAlltoAll came with NCCL 2.28. Called with nccl_ locked.
NcclLibrary::Status NcclCommunicator::all_to_all(const NcclRequest& request) {
  const std::size_t block = request.count * bytes_of(request.dtype);
  const int type = kDTypes[std::size_t(request.dtype)];
  const auto is_bad = [](NcclLibrary::Status status) { return status != kNcclSuccess && status != kNcclInProgress; };
  NcclLibrary::Status status = library_->group_start();
  if (is_bad(status)) return status;
  for (int peer = 0; peer < size_ && !is_bad(status); ++peer) {
    const char* from = static_cast<const char*>(request.in) + std::size_t(peer) * block;
    char* to = static_cast<char*>(request.out) + std::size_t(peer) * block;
    status = library_->send(from, request.count, type, peer, comm_, stream_->get());
    if (!is_bad(status)) status = library_->receive(to, request.count, type, peer, comm_, stream_->get());
  }
  const NcclLibrary::Status end = library_->group_end();  // also after a failure, or the group would stay open
  return is_bad(status) ? status : end;
}

void NcclCommunicator::wait(const NcclOp& op, CudaStream stream) {
  check();
  ContextScope scope(*driver_, context_);
  driver_->wait(stream, op.ended.get());
}

bool NcclCommunicator::is_done(NcclOp& op) {
  check();
  if (op.is_captured || op.has_ended) return true;
  return driver_->has_happened(op.ended.get());
}

void NcclCommunicator::begin_graph(CudaStream stream, const std::string& name) {
  check();
  ContextScope scope(*driver_, context_);
  graph_ = next_op(name);
  graph_->is_graph = true;
  driver_->record(graph_->ready.get(), stream);
}

void NcclCommunicator::end_graph(CudaStream stream) {
  check();
  if (graph_ == nullptr) return;  // its begin was of another call
  ContextScope scope(*driver_, context_);
  driver_->record(graph_->ended.get(), stream);
  keep(std::move(graph_));
}

std::shared_ptr<NcclOp> NcclCommunicator::next_op(std::string_view name) {
  std::unique_ptr<NcclOp> op;
  {
    std::lock_guard lock(pool_->mutex);
    if (!pool_->free.empty()) {
      op = std::move(pool_->free.back());
      pool_->free.pop_back();
    }
  }
  if (op == nullptr) op = std::make_unique<NcclOp>(driver_);
  op->name = name;
  op->running_since_s = 0;
  op->is_graph = op->is_captured = op->has_ended = op->was_aborted = false;
  return {op.release(), [pool = pool_](NcclOp* ended) {
            std::unique_ptr<NcclOp> owner(ended);
            // a forked child may find the mutex held for ever
            if (std::unique_lock lock(pool->mutex, std::try_to_lock); lock) pool->free.push_back(std::move(owner));
          }};
}

void NcclCommunicator::keep(std::shared_ptr<NcclOp> op) {
  std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(op));
  if (is_asleep_) wake_.notify_one();
}

// Waits until NCCL has done what it was given; `label` says what that is.
void NcclCommunicator::poll_until_done(const std::function<std::string()>& label, double limit_s,
                              const std::function<void()>& interrupt) {
  const double start_s = now_s();
  for (int attempt = 1;; ++attempt) {
    const NcclLibrary::Status status = state();
    if (status == kNcclSuccess) return;
    library_->check(status, where(label()));
    if (attempt <= kSpins) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (interrupt && attempt % 100 == 0) interrupt();
    if (const std::string dead = dead_peer(); !dead.empty()) throw CommError(where(label()) + ": " + dead + " died");
    if (now_s() - start_s > limit_s)
      throw CommError(where(label()) + ": waited " + seconds(limit_s) +
                      " in NCCL for the other ranks; one is stopped, too slow, or does not make this call");
  }
}

NcclLibrary::Status NcclCommunicator::state() {
  std::lock_guard lock(nccl_);
  NcclLibrary::Status status = kNcclSuccess;
  if (comm_ == nullptr) return status;
  const NcclLibrary::Status failed = library_->get_async_error(comm_, &status);
  return failed != kNcclSuccess ? failed : status;
}

// A peer of this host that has been dead for a while: what it gave before has arrived, or will not.
std::string NcclCommunicator::dead_peer() {
  std::lock_guard lock(peers_mutex_);
  const std::string dead = peers_.dead();
  if (dead.empty()) return "";
  if (dead_since_s_ == 0) dead_since_s_ = now_s();
  return now_s() - dead_since_s_ > kGraceS ? dead : "";
}

// ---- failure and the end ------------------------------------------------------------------------------

void NcclCommunicator::watch_all() {
  try {
    ContextScope scope(*driver_, context_);
    driver_->relax_captures();
    std::unique_lock lock(mutex_);
    int idle_looks = 0;
    while (!is_stopping_ && error_.empty()) {
      idle_looks = in_flight_.empty() ? idle_looks + 1 : 0;
      if (idle_looks > kIdleLooks) {
        is_asleep_ = true;
        wake_.wait(lock);
        is_asleep_ = false;
        continue;
      }
      wake_.wait_for(lock, std::chrono::duration<double>(kPollS));
      const std::string text = trouble();
      if (text.empty()) continue;
      lock.unlock();
      fail(text);
      lock.lock();
    }
  } catch (const std::runtime_error& error) {
    fail(where("watching: ") + error.what());
  }
}

// What is wrong with the oldest collective in flight, "" if nothing; forgets those that have ended.
std::string NcclCommunicator::trouble() {
  while (!in_flight_.empty() && driver_->has_happened(in_flight_.front()->ended.get())) {
    in_flight_.front()->has_ended = true;
    in_flight_.pop_front();
  }
  if (in_flight_.empty()) return "";
  NcclOp& op = *in_flight_.front();
  const NcclLibrary::Status status = state();
  if (status != kNcclSuccess && status != kNcclInProgress) return where(op.label()) + ": " + library_->text_of(status);
  if (op.running_since_s == 0 && driver_->has_happened(op.ready.get())) op.running_since_s = now_s();
  if (op.running_since_s == 0) return "";
  if (const std::string dead = dead_peer(); !dead.empty()) return where(op.label()) + ": " + dead + " died";
  if (now_s() - op.running_since_s <= timeout_s_) return "";
  return where(op.label()) + ": waited " + seconds(timeout_s_) +
         " in NCCL for the other ranks; one is stopped, too slow, or does not make this call";
}

void NcclCommunicator::check() {
  if (is_usable_ && !is_forked()) return;
  if (is_forked())  // before the mutex, which the parent's thread may have held
    throw CommError(where("an NCCL communicator made before fork() is not usable in the child; make the world after"));
  std::lock_guard lock(mutex_);
  if (!error_.empty()) throw CommError(error_);
  if (is_closed_) throw CommError(where("this communicator is closed"));
}

void NcclCommunicator::check_failure() {
  if (is_usable_ || is_forked()) return;
  std::lock_guard lock(mutex_);
  if (!error_.empty() && !is_closed_) throw CommError(error_);
}

void NcclCommunicator::fail(const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (!error_.empty()) return;
    error_ = text;
    is_usable_ = false;
    wake_.notify_all();
  }
  leave(library_->abort);
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<NcclOp>& op : in_flight_) {
    op->was_aborted = true;
    op->has_ended = true;
  }
  in_flight_.clear();
}

void NcclCommunicator::abort(const std::string& reason) {
  if (is_forked()) return;
  fail(where("this communicator is broken by an earlier failure: ") + reason);
  close();
}

void NcclCommunicator::close(double limit_s) {
  if (is_forked()) return;  // all of it, the watching thread too, is the parent's
  bool is_idle, is_well;
  {
    std::lock_guard lock(mutex_);
    if (is_closed_) return;
    is_closed_ = is_stopping_ = true;
    is_usable_ = false;
    is_well = error_.empty();
    is_idle = in_flight_.empty();
    wake_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
  if (!is_well) return;  // aborted already
  try {
    ContextScope scope(*driver_, context_);
    if (!is_idle && !peers_.dead().empty()) throw CommError("");
    {
      std::lock_guard lock(nccl_);
      library_->check(library_->finalize(comm_), "ncclCommFinalize");
    }
    poll_until_done([] { return "NCCL's end"; }, std::min(timeout_s_, limit_s));
    leave(library_->destroy);
  } catch (const std::runtime_error&) {  // no rank is left to report to
    leave(library_->abort);
  }
}

// Ends NCCL's communicator in the way given, in a thread that is left to itself if it takes too long.
void NcclCommunicator::leave(NcclLibrary::Status (*how)(NcclHandle)) {
  NcclHandle comm;
  {
    std::lock_guard lock(nccl_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm == nullptr) return;
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> has_left = promise->get_future();
  const SignalsBlocked blocked;  // the thread inherits it
  std::thread([how, comm, promise, driver = driver_, context = context_] {
    try {
      ContextScope scope(*driver, context);
      how(comm);
    } catch (const CudaError&) {  // the GPU is lost, and NCCL's communicator with it
    }
    promise->set_value();
  }).detach();
  has_left.wait_for(std::chrono::duration<double>(std::min(timeout_s_, kLeaveS)));
}

}  // namespace singa_lite
