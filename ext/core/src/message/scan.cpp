// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "message/scan.h"

#include <cassert>

namespace kvstrata {

namespace {

// Reads big-endian numbers within a message; `ok` is false once the message has ended too early.
struct Reader {
  const std::uint8_t* at;
  const std::uint8_t* end;
  bool ok = true;

  std::uint64_t number(std::size_t width) noexcept {
    if (static_cast<std::size_t>(end - at) < width) {
      ok = false;
      return 0;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i) {
      value = value << 8 | *at++;
    }
    return value;
  }

  void skip(std::uint64_t bytes) noexcept {
    if (static_cast<std::uint64_t>(end - at) < bytes) {
      ok = false;
      return;
    }
    at += bytes;
  }
};

enum class Kind : std::uint8_t { kPlain, kNumber, kText, kBinary, kExtension, kArray, kMap };

// The header of one value. `length`: bytes, values or pairs that follow; the value of a kNumber.
struct Header {
  Kind kind;
  std::uint64_t length;
  bool broken = false;
};

Header read_header(Reader& from) noexcept {
  const auto first = static_cast<std::uint8_t>(from.number(1));
  if (first < 0x80) {
    return {Kind::kNumber, first};
  }
  if (first < 0x90) {
    return {Kind::kMap, first & 0x0FU};
  }
  if (first < 0xA0) {
    return {Kind::kArray, first & 0x0FU};
  }
  if (first < 0xC0) {
    return {Kind::kText, first & 0x1FU};
  }
  switch (first) {
    case 0xC1:
      return {Kind::kPlain, 0, true};
    case 0xC4:
    case 0xC5:
    case 0xC6:
      return {Kind::kBinary, from.number(std::size_t{1} << (first - 0xC4))};
    case 0xC7:
    case 0xC8:
    case 0xC9:
      return {Kind::kExtension, from.number(std::size_t{1} << (first - 0xC7)) + 1};
    case 0xCA:
      return {Kind::kPlain, 4};
    case 0xCB:
      return {Kind::kPlain, 8};
    case 0xCC:
    case 0xCD:
    case 0xCE:
    case 0xCF:
      return {Kind::kNumber, from.number(std::size_t{1} << (first - 0xCC))};
    case 0xD0:
    case 0xD1:
    case 0xD2:
    case 0xD3:  // a signed integer, which counts as a number only if it is not negative
    {
      const std::size_t width = std::size_t{1} << (first - 0xD0);
      const std::uint64_t value = from.number(width);
      const bool negative = (value >> (8 * width - 1) & 1) != 0;
      return negative ? Header{Kind::kPlain, 0} : Header{Kind::kNumber, value};
    }
    case 0xD4:
    case 0xD5:
    case 0xD6:
    case 0xD7:
    case 0xD8:
      return {Kind::kExtension, (std::uint64_t{1} << (first - 0xD4)) + 1};
    case 0xD9:
    case 0xDA:
    case 0xDB:
      return {Kind::kText, from.number(std::size_t{1} << (first - 0xD9))};
    case 0xDC:
    case 0xDD:
      return {Kind::kArray, from.number(std::size_t{2} << (first - 0xDC))};
    case 0xDE:
    case 0xDF:
      return {Kind::kMap, from.number(std::size_t{2} << (first - 0xDE))};
    default:  // nil, booleans, negative small integers
      return {Kind::kPlain, 0};
  }
}

// Notes value `index` of the outermost array, whose bytes begin at `at`.
void note(MessageHead& head, std::uint64_t index, const Header& header,
          const std::uint8_t* at) noexcept {
  if (index == 0 && header.kind == Kind::kText) {
    head.op = at;
    head.op_bytes = static_cast<std::uint32_t>(header.length);
  } else if (index == 1 && header.kind == Kind::kBinary && header.length == kSessionBytes) {
    head.session = at;
  } else if (index == 2 && header.kind == Kind::kNumber && header.length >> 63 == 0) {
    head.seq = header.length;
  }
}

}  // namespace

MessageHead scan_message(const std::uint8_t* message, std::size_t bytes,
                         const ScanLimits& limits) noexcept {
  assert(limits.depth <= kMaxScanDepth);
  MessageHead head;
  const auto failed = [&head](ScanFault fault) noexcept {
    head.fault = fault;
    return head;
  };
  Reader from{message, message + bytes};
  // Values left in each open container; the outermost one holds the message itself.
  std::uint64_t left[kMaxScanDepth + 1] = {1};
  std::uint32_t depth = 0;
  std::uint64_t elements = 0;
  std::uint64_t index = 0;
  bool in_array = false;
  while (true) {
    while (depth > 0 && left[depth] == 0) {
      --depth;
    }
    if (left[depth] == 0) {
      return from.at == from.end ? head : failed(ScanFault::kBroken);
    }
    --left[depth];
    if (++elements > limits.elements) {
      return failed(ScanFault::kTooMany);
    }
    const bool of_array = depth == 1 && in_array;
    const Header header = read_header(from);
    if (!from.ok || header.broken) {
      return failed(ScanFault::kBroken);
    }
    const std::uint8_t* const at = from.at;
    switch (header.kind) {
      case Kind::kNumber:
        break;
      case Kind::kPlain:
        from.skip(header.length);
        break;
      case Kind::kText:
        if (header.length > limits.text_bytes) {
          return failed(ScanFault::kLongText);
        }
        from.skip(header.length);
        break;
      case Kind::kBinary:
      case Kind::kExtension:
        if (header.length > limits.binary_bytes) {
          return failed(ScanFault::kLongBinary);
        }
        from.skip(header.length);
        break;
      case Kind::kArray:
      case Kind::kMap: {
        const std::uint64_t values = header.kind == Kind::kMap ? 2 * header.length : header.length;
        if (values > limits.elements - elements) {
          return failed(ScanFault::kTooMany);
        }
        if (depth == limits.depth) {
          return failed(ScanFault::kTooDeep);
        }
        if (depth == 0) {
          in_array = header.kind == Kind::kArray;
        }
        left[++depth] = values;
        break;
      }
    }
    if (!from.ok) {
      return failed(ScanFault::kBroken);
    }
    if (of_array) {
      note(head, index++, header, at);
    }
  }
}

}  // namespace kvstrata
