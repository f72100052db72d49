// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "base/reason.h"

#include <cerrno>
#include <set>
#include <string>

#include "base/status.h"
#include "files/outcome.h"
#include "support/check.h"

using namespace kvstrata;

namespace {

TEST(each_word_names_one_reason) {
  std::set<std::string> words;
  for (const ReasonRow& row : kReasons) {
    CHECK(words.insert(row.word).second);
    CHECK(reason_of(row.word) == row.reason);
    CHECK_EQ(std::string(word_of(row.reason)), std::string(row.word));
  }
  CHECK(!reason_of("a word of another connector").has_value());
}

TEST(an_item_without_an_outcome_has_the_reason_internal) {
  CHECK(reason_of(PutItem().reason) == Reason::kInternal);
  CHECK(reason_of(LoadItem().reason) == Reason::kInternal);
  CHECK(reason_of(ExistsItem().reason) == Reason::kNone);
}

TEST(a_put_is_throttled_for_exactly_the_retryable_reasons) {
  for (const ReasonRow& row : kReasons) {
    PutItem item;
    set_outcome(item, put_refusal(row.reason));
    CHECK(item.status == (row.retryable ? PutStatus::kThrottled : PutStatus::kFailed));
    CHECK(reason_of(item.reason) == row.reason);
  }
}

TEST(a_full_file_system_and_a_limit_on_its_free_space_are_one_reason) {
  for (const int full : {ENOSPC, EDQUOT})
    CHECK(file_reason(Status(StatusCode::kOsError, "write", full)) == Reason::kDiskFull);
  CHECK(file_reason(Status(StatusCode::kNoSpace, Reason::kDiskFull, "limit")) == Reason::kDiskFull);
  CHECK(file_reason(Status(StatusCode::kNoSpace, "no memory")) == Reason::kIo);
  CHECK(file_reason(Status(StatusCode::kOsError, "write", EIO)) == Reason::kIo);
}

}  // namespace
