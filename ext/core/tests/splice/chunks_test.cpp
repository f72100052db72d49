// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "splice/chunks.h"

#include <string>

#include "support/check.h"

using namespace kvstrata;

namespace {

struct Read {
  std::string body;
  std::size_t used = 0;
  bool done = false;
  bool broken = false;
};

// Decodes `coded` in pieces of this many bytes.
Read read(const std::string& coded, std::size_t piece) {
  ChunkReader reader;
  Read found;
  for (std::size_t at = 0; at < coded.size() && !reader.done() && !reader.broken(); at += piece) {
    std::string part = coded.substr(at, piece);
    std::size_t used = 0;
    const std::size_t kept =
        reader.decode(reinterpret_cast<std::uint8_t*>(part.data()), part.size(), &used);
    found.body += part.substr(0, kept);
    found.used += used;
  }
  found.done = reader.done();
  found.broken = reader.broken();
  return found;
}

TEST(a_body_is_the_same_however_it_is_cut) {
  const std::string coded =
      "5\r\nhello\r\nA;name=\"v\"\r\n0123456789\r\n0\r\nX-Trailer: 1\r\n\r\nrest";
  for (std::size_t piece = 1; piece <= coded.size(); ++piece) {
    const Read found = read(coded, piece);
    CHECK(found.done && !found.broken);
    CHECK_EQ(found.body, "hello0123456789");
    CHECK_EQ(found.used, coded.size() - 4);
  }
}

TEST(what_another_reader_could_understand_differently_is_broken) {
  for (const char* coded : {
           "\r\n",
           "x\r\n",
           "5\nhello",
           "5 \r\nhello",
           "-5\r\n",
           "+5\r\n",
           "0x5\r\n",
           "5\r\rhello",
           "5\r\nhello5\r\n",
           "5\r\nhello\n0\r\n",
           "5\r\nhello\r0",
           "5;a\nb\r\n",
           "0\r\nX: 1\n\r\n",
           "1000000000000000\r\n",
           "FFFFFFFFFFFFFFFFF\r\n",
           "0\r\n\r\r",
           "5;a\x01\r\n",
       }) {
    const std::string text = coded;
    CHECK(read(text, text.size()).broken);
    CHECK(read(text, 1).broken);
  }
}

TEST(lines_and_trailers_are_bounded) {
  const std::string longest(ChunkReader::kMaxLineBytes - 1, 'a');
  CHECK(!read("5;" + longest, 100).broken);
  CHECK(read("5;" + longest + "a", 100).broken);
  std::string trailers = "0\r\n";
  while (trailers.size() < ChunkReader::kMaxTrailerBytes + 4096) {
    trailers += "X: 0123456789\r\n";
  }
  CHECK(read(trailers, 1000).broken);
}

}  // namespace
