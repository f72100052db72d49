// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The copy engine of a GPU: jobs of gathers (blocks -> records) and scatters (records -> blocks) as
// in copy/engine.h, but the blocks lie in a device's memory.
//
// Each direction has a stream (of high priority for loads, of low priority for stores), a thread
// that queues copies on the stream and a thread that waits for their ends. Helper threads compute
// checksums of the payloads, which lie in host memory.
//
//   queued -> begun (its copies are on the stream) -> ended (event reached, checksums done) -> read
//
//   gather   The magic of the record is destroyed, and copies are queued behind the plan's moment.
//            When the stream has reached the item's event, helpers compute the CRCs of the payload
//            in place, and the helper that ends the last CRC writes the header.
//   scatter  The header is checked; if it is bad, the item ends and no block is touched. Otherwise
//            copies are queued, and meanwhile helpers verify the payload. The item ends after both.
//   layerwise scatter: the items of a job begin together and are copied section by section, with an
//            event after each section, so that another stream can wait for it (await_section).
//
// A gather with a rounding of numbers that cannot be rounded (infinite or a NaN) ends as kFailed,
// without a header.
//
// Invariants. (1) An accepted job ends in exactly one completion. (2) An item ends only when the
// stream has reached its event, even if the item failed or the job was cancelled; until then its
// extent and its blocks are in use. The exception is a sticky error, after which the context is
// lost and touches no memory. (3) Queued, begun and unread jobs together never exceed the queue's
// capacity. (4) The items that an error of CUDA has hit end as kFailed, and no others, unless the
// error is sticky: then failed() returns it and every later item ends as kFailed. (5) Only
// await_section makes a stream of the caller wait, and no function synchronises with such a stream.
//
// All methods are thread-safe except the destructor. In a forked child the object is unusable:
// close() and the destructor return at once, and nothing else may be called.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mover.h"

namespace kvstrata::cuda {

struct EngineOptions {
  Way way = Way::kDma;
  int threads = 8;       // threads that compute checksums
  unsigned max_sms = 4;  // most thread blocks of a kernel; each runs on one multiprocessor
  std::uint64_t staging_bytes = 64 << 20;  // for each direction, if `rounds`
  std::size_t queue = 256;                 // jobs
  bool rounds = false;  // takes plans with a rounding; then never by dma, and always with staging
};

class CudaCopyEngine {
 public:
  // Starts the threads. Sets `*status` to kBadArgument if an option is out of range, or to another
  // error that is not one of CUDA; returns a failure of CUDA, or says why records cannot be
  // rounded.
  // `*out` is set only if both are ok.
  static Failure create(std::shared_ptr<Device> device, const EngineOptions& options,
                        Status* status, std::unique_ptr<CudaCopyEngine>* out);
  ~CudaCopyEngine();
  CudaCopyEngine(const CudaCopyEngine&) = delete;
  CudaCopyEngine& operator=(const CudaCopyEngine&) = delete;

  // See the functions of CopyEngine. std::bad_alloc is thrown instead of kNoSpace.
  [[nodiscard]] int event_fd() const noexcept;
  Status submit(std::uint64_t job_id, CopyKind kind, CudaPlan plan, std::vector<CopyItem> items);
  void completions(std::vector<CopyCompletion>* out);
  Status run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
             std::vector<CopyResult>* results);
  bool wait(std::uint64_t job_id, std::chrono::nanoseconds timeout);
  bool cancel(std::uint64_t job_id);
  void drain();
  void close();

  // The way that copies take: dma if the options name the kernel and the device has none.
  [[nodiscard]] Way way() const noexcept;
  // Why it is another way than the options name; "" if it is that way.
  [[nodiscard]] const std::string& reason() const noexcept;

  // The moment after all work that the caller has queued on its `stream` so far.
  Failure moment(Stream stream, std::shared_ptr<Moment>* out);
  // Waits until the copies of that section (of all sections, unless the job is a layerwise scatter)
  // of all items of the job are queued, then makes `stream` wait for them. `*queued` is false if
  // the timeout passed, or the job was cancelled or met an error of CUDA; it is true at once for a
  // job whose completion was read.
  Failure await_section(std::uint64_t job_id, std::size_t section, Stream stream,
                        std::chrono::nanoseconds timeout, bool* queued);

  PinnedMemory& pinned() noexcept;
  // The sticky error, if there was one.
  [[nodiscard]] Failure failed() const;

 private:
  class Impl;

  explicit CudaCopyEngine(std::unique_ptr<Impl> impl) noexcept;

  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata::cuda
