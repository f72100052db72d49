// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// How far a prompt can be served whose KV has several groups. A slice with span 0 is needed in each
// chunk of a hit; a slice with span k only in the last k chunks: those of a sliding window, or the
// last chunk for a state. Chunks before them may be absent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvstrata {

// The most chunks n, at most `n_chunks`, such that `present(chunk, slice)` for the last
// `spans[slice]` of these n chunks (all n, if there are fewer) of each slice whose span is not 0.
// Asks for each chunk of a slice at most once.
template <class Present>
std::size_t longest_windows(std::size_t n_chunks, std::span<const std::uint32_t> spans,
                            Present&& present) {
  std::size_t n = n_chunks;
  // Of each slice the chunks from `known[slice]` up to n are present.
  std::vector<std::size_t> known(spans.size(), n);
  for (std::size_t slice = 0, agreed = 0; n != 0 && agreed < spans.size();
       slice = (slice + 1) % spans.size()) {
    const std::size_t first = n - std::min<std::size_t>(n, spans[slice]);
    std::size_t chunk = std::min(known[slice], n);
    while (chunk > first && present(chunk - 1, slice))
      --chunk;
    known[slice] = chunk;
    if (chunk <= first) {
      ++agreed;
      continue;
    }
    // Every longer hit would need this absent chunk as well.
    n = chunk - 1;
    agreed = 0;
  }
  return n;
}

}  // namespace kvstrata
