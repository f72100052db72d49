// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A descriptor for event loops: readable from signal() to the next drain().
#pragma once

#include "base/status.h"

namespace kvstrata {

// signal() and drain() are thread-safe and never block. The object owns the descriptor and closes
// it in the destructor.
class EventFd {
 public:
  EventFd() noexcept = default;
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  // kOsError: the system gives no descriptor; detail(0) is errno. REQUIRES: open() was not called
  // before.
  Status open() noexcept;

  // -1 before open().
  [[nodiscard]] int fd() const noexcept { return fd_; }

  // Makes the descriptor readable; several signals before a drain() count as one.
  void signal() const noexcept;
  // Makes the descriptor unreadable until the next signal().
  void drain() const noexcept;

 private:
  int fd_ = -1;
};

}  // namespace kvstrata
