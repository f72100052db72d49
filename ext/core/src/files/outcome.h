// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The outcomes of puts and loads, made from reasons.
#pragma once

#include <utility>

#include "base/reason.h"
#include "base/status.h"
#include "files/files.h"
#include "kvstrata/connector.h"

namespace kvstrata {

using PutOutcome = std::pair<PutStatus, Reason>;
using LoadOutcome = std::pair<LoadStatus, Reason>;

// The outcome of a put that was refused or has failed for this reason.
constexpr PutOutcome put_refusal(Reason reason) noexcept {
  return {row_of(reason).retryable ? PutStatus::kThrottled : PutStatus::kFailed, reason};
}

// The reason of an error of the file layer.
inline Reason file_reason(const Status& status) noexcept {
  return is_no_space(status) ? Reason::kDiskFull : Reason::kIo;
}

template <typename Item, typename ItemStatus>
void set_outcome(Item& item, const std::pair<ItemStatus, Reason>& outcome) noexcept {
  item.status = outcome.first;
  item.reason = word_of(outcome.second);
}

}  // namespace kvstrata
