// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// For the threads that kvstrata starts: they receive no signals, and have names (`top -H`) and
// priorities.
#pragma once

#include <signal.h>

#include <string>
#include <thread>
#include <utility>

namespace kvstrata {

// Blocks all signals in the calling thread until the object is destroyed. Threads that the calling
// thread starts meanwhile inherit the block for their whole life, so that only the application's
// own threads receive signals.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Starts a thread that receives no signals. Raises std::system_error.
template <typename... Work>
std::thread start_thread(Work&&... work) {
  const SignalsBlocked blocked;
  return std::thread(std::forward<Work>(work)...);
}

// Lowers the priority of the calling thread, for as long as it lives, by this many steps of nice(2)
// below the process's. A system that refuses leaves it as it is.
void lower_priority(int steps) noexcept;

// Names a running thread; the kernel keeps the first 15 characters.
void name_thread(std::thread& thread, const std::string& name) noexcept;

}  // namespace kvstrata
