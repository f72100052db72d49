// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "files/notes.h"

#include <iterator>
#include <utility>

namespace kvstrata {

void NoteBook::add(bool warning, std::string text) {
  const std::lock_guard lock(mutex_);
  if (notes_.size() < kLimit)
    notes_.push_back({warning, std::move(text)});
  else
    dropped_ += 1;
}

void NoteBook::take(std::vector<ConnectorNote>* out) {
  const std::lock_guard lock(mutex_);
  out->insert(out->end(), std::make_move_iterator(notes_.begin()),
              std::make_move_iterator(notes_.end()));
  notes_.clear();
  if (dropped_ > 0) out->push_back({true, std::to_string(dropped_) + " more notes were dropped"});
  dropped_ = 0;
}

}  // namespace kvstrata
