// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The copy engine of a GPU: jobs of gathers (blocks -> records) and scatters (records -> blocks) as
// kvstrata/copy_engine.h has them, with a device's memory on one side.
//
// Each direction has a stream (loads high, stores low priority), a thread that queues copies on it
// and one that waits for their ends; helpers compute checksums over the host's side.
//
//   queued -> begun (its copies go onto the stream) -> ended (event come, checksums done) -> read
//
//   gather   the magic is destroyed, copies are queued behind the plan's moment; when the item's
//            event has come, helpers compute the CRCs of the payload in place, and whoever ends the
//            last one writes the header.
//   scatter  the header is checked (bad: the item ends, no block is touched), copies are queued;
//            meanwhile helpers verify the payload. The outcome needs both.
//   layerwise scatter: the items of a job begin together and go section by section, an event after
//            each, so that another stream can wait for a section (await_section).
//
// A gather of numbers that cannot be rounded (infinite or none) ends as kFailed, without a header.
//
// Invariants. (1) A job that was accepted ends in exactly one completion. (2) An item ends only
// when its event has come, whatever was cancelled or failed; until then its extent and its blocks
// are in use. The exception is a sticky error: the context is gone and touches them no more.
// (3) queued + begun + unread jobs never exceed the queue's capacity. (4) An error of CUDA ends the
// items that it hit as kFailed and nothing else, unless it is sticky: then failed() says so and
// every later item ends as kFailed. (5) Nothing here makes a caller's stream wait except
// await_section, and nothing synchronises with it.
//
// All methods are thread-safe except the destructor. In a forked child the object is dead: close()
// and the destructor return at once, nothing else may be called.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "choice.h"

namespace kvstrata::cuda {

class CudaCopyEngine {
 public:
  // kBadArgument of the options goes to `status`. An engine that rounds fails where it has no
  // kernels, no room for staging, or the way is dma.
  static Failure create(std::shared_ptr<Device> device, const EngineOptions& options,
                        Status* status, std::unique_ptr<CudaCopyEngine>* out);
  ~CudaCopyEngine();
  CudaCopyEngine(const CudaCopyEngine&) = delete;
  CudaCopyEngine& operator=(const CudaCopyEngine&) = delete;

  // As of CopyEngine.
  [[nodiscard]] int event_fd() const noexcept;
  Status submit(std::uint64_t job_id, CopyKind kind, CudaPlan plan, std::vector<CopyItem> items);
  void completions(std::vector<CopyCompletion>* out);
  Status run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
             std::vector<CopyResult>* results);
  bool wait(std::uint64_t job_id, std::chrono::nanoseconds timeout);
  bool cancel(std::uint64_t job_id);
  void drain();
  void close();

  [[nodiscard]] Choice choice() const;
  // Measures the ways that this engine may take and chooses one; an engine with a way of its own
  // only measures.
  Failure choose(const CopyPlan& plan, std::span<const std::uint32_t> blocks, std::uint64_t host,
                 std::uint64_t host_bytes);

  // What was queued on `stream`, the caller's, until now.
  Failure moment(Stream stream, std::shared_ptr<Moment>* out);
  // Waits until the copies of that section (of all sections, unless the plan is layerwise) of all
  // items of the job are queued, then makes `stream` wait for them. `queued` is false when the time
  // is over, or the job was cancelled or met an error of CUDA. True at once for a job whose
  // completion was read.
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
