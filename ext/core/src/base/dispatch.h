// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Dispatch chooses among several implementations ("paths") of one function. The first use chooses
// the best path that this CPU can run; `set` chooses another.
//
// Thread-safe. `set` and `reset` affect calls that begin after them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace kvstrata {

// `Path` is an enumeration of 0 .. kCount - 1, from the slowest path to the fastest; path 0 runs on
// every CPU. `kImplementationOf(path)` is a pointer, null if this CPU or build lacks the path.
template <typename Path, int kCount, auto kImplementationOf>
class Dispatch {
 public:
  using Implementation = decltype(kImplementationOf(Path{}));

  static bool supported(Path path) noexcept {
    const auto i = static_cast<std::size_t>(path);
    return i < all().size() && all()[i].implementation != nullptr;
  }

  static Path path() noexcept { return current().path; }
  static Implementation implementation() noexcept { return current().implementation; }

  // kUnsupported with `message` when this CPU cannot run `path`; then nothing changes.
  static Status set(Path path, const char* message) noexcept {
    if (!supported(path)) {
      return Status(StatusCode::kUnsupported, message, static_cast<std::int64_t>(path));
    }
    chosen_.store(&all()[static_cast<std::size_t>(path)], std::memory_order_release);
    return Status();
  }

  // Chooses the best path of this CPU again.
  static void reset() noexcept { chosen_.store(best(), std::memory_order_release); }

 private:
  struct Choice {
    Path path;
    Implementation implementation;
  };

  static const std::array<Choice, kCount>& all() noexcept {
    static const std::array<Choice, kCount> table = [] {
      std::array<Choice, kCount> t{};
      for (int i = 0; i < kCount; ++i) {
        const auto path = static_cast<Path>(i);
        t[static_cast<std::size_t>(i)] = Choice{path, kImplementationOf(path)};
      }
      return t;
    }();
    return table;
  }

  static const Choice* best() noexcept {
    for (std::size_t i = all().size(); i-- > 1;) {
      if (all()[i].implementation != nullptr) {
        return &all()[i];
      }
    }
    return &all()[0];
  }

  static const Choice& current() noexcept {
    const Choice* c = chosen_.load(std::memory_order_acquire);
    if (c == nullptr) [[unlikely]] {
      c = best();
      const Choice* expected = nullptr;
      if (!chosen_.compare_exchange_strong(expected, c, std::memory_order_acq_rel)) {
        c = expected;
      }
    }
    return *c;
  }

  static inline std::atomic<const Choice*> chosen_{nullptr};
};

}  // namespace kvstrata
