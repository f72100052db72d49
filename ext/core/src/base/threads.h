// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// For the threads that kvstrata starts: they receive no signals, and have names (`top -H`).
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

// Names a running thread; the kernel keeps the first 15 characters.
void name_thread(std::thread& thread, const std::string& name) noexcept;

}  // namespace kvstrata
