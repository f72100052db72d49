// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Collects a connector's notes for the server's log.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "kvstrata/connector.h"

namespace kvstrata {

// Keeps at most 32 notes between two calls of take() and counts the rest. Thread-safe; takes no
// other lock.
class NoteBook {
 public:
  void add(bool warning, std::string text);
  // Appends the notes since the last call and, if notes were dropped, a note with their number.
  void take(std::vector<ConnectorNote>* out);

 private:
  static constexpr std::size_t kLimit = 32;
  std::mutex mutex_;
  std::vector<ConnectorNote> notes_;
  std::uint64_t dropped_ = 0;
};

}  // namespace kvstrata
