// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "message/scan.h"

#include <string>

#include "support/check.h"

using namespace kvstrata;

namespace {

constexpr ScanLimits kLimits{4, 20, 10, 32};

MessageHead scan(const std::string& message, const ScanLimits& limits = kLimits) {
  return scan_message(reinterpret_cast<const std::uint8_t*>(message.data()), message.size(),
                      limits);
}

const std::string kSession = "\xC4\x10" + std::string(16, 's');

}  // namespace

TEST(the_first_three_values_of_an_array_are_its_head) {
  const std::string message = "\x93\xA4ping" + kSession + "\xCD\x01\x02";
  const MessageHead head = scan(message);
  CHECK(head.fault == ScanFault::kNone);
  CHECK_EQ(std::string(reinterpret_cast<const char*>(head.op), head.op_bytes), "ping");
  CHECK(head.session != nullptr && *head.session == 's');
  CHECK_EQ(head.seq, 0x102U);
}

TEST(values_of_another_kind_are_absent_and_the_next_ones_are_still_read) {
  const MessageHead head = scan(
      "\x93\xC0\xC4\x03"
      "abc\x05");
  CHECK(head.op == nullptr && head.session == nullptr);
  CHECK_EQ(head.seq, 5U);
  CHECK_EQ(scan("\x93\xC0\xC0\xFF").seq, 0U);
  CHECK_EQ(scan("\x93\xC0\xC0\xD0\xFF").seq, 0U);
  CHECK_EQ(scan("\x93\xC0\xC0\xCF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF").seq, 0U);
  CHECK(scan("\x81\xA1k\x93\xA1x\xC0\x05").op == nullptr);  // a map has no head
}

TEST(each_limit_has_its_fault_before_the_value_is_read) {
  CHECK(scan("\x91\x91\x91\x91\x01").fault == ScanFault::kNone);
  CHECK(scan("\x91\x91\x91\x91\x91\x01").fault == ScanFault::kTooDeep);
  CHECK(scan("\xDD\xFF\xFF\xFF\xFF").fault == ScanFault::kTooMany);
  CHECK(scan("\xDF\xFF\xFF\xFF\xFF").fault == ScanFault::kTooMany);
  CHECK(scan("\xDC" + std::string("\0\x13", 2) + std::string(19, '\1')).fault == ScanFault::kNone);
  CHECK(scan("\xDC" + std::string("\0\x14", 2) + std::string(20, '\1')).fault ==
        ScanFault::kTooMany);
  CHECK(scan("\x91\xAB" + std::string(11, 'a')).fault == ScanFault::kLongText);
  CHECK(scan("\x91\xC4\x21" + std::string(33, 'a')).fault == ScanFault::kLongBinary);
  CHECK(scan("\x91\xC7\x20\x01" + std::string(32, 'a')).fault == ScanFault::kLongBinary);
}

TEST(a_broken_message_is_read_up_to_its_fault) {
  for (const char* broken : {"", "\x91", "\xC1", "\x92\x01", "\x01\x01", "\xCD\x01", "\xA3zz"}) {
    CHECK(scan(broken).fault == ScanFault::kBroken);
  }
  const MessageHead head = scan("\x94\xA4ping" + kSession + "\x07");
  CHECK(head.fault == ScanFault::kBroken);
  CHECK_EQ(head.seq, 7U);
}
