// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Two engines in one process under sanitizers: ucx_engine_test LIBUCP TLS
#include "engine.h"

#include <poll.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

using kvstrata::UcxEnd;
using kvstrata::UcxEngine;
using kvstrata::UcxEvent;
using kvstrata::UcxItem;

namespace {

constexpr std::size_t kRegionBytes = 8 << 20, kItemBytes = 256 << 10;

struct Side {
  std::vector<unsigned char> memory = std::vector<unsigned char>(kRegionBytes);
  std::unique_ptr<UcxEngine> engine;
  std::map<std::uint64_t, UcxEvent> events;

  Side(const std::string& library, const std::string& tls) {
    kvstrata::UcxOptions options;
    options.library = library;
    options.config = {{"TLS", tls}};
    options.memory = reinterpret_cast<std::uint64_t>(memory.data());
    options.memory_bytes = memory.size();
    engine = std::make_unique<UcxEngine>(std::move(options));
  }

  const UcxEvent& wait(std::uint64_t ticket) {
    while (events.find(ticket) == events.end()) {
      pollfd fd{engine->event_fd(), POLLIN, 0};
      CHECK(poll(&fd, 1, 60'000) == 1);
      for (UcxEvent& event : engine->take_events()) {
        CHECK(events.emplace(event.ticket, event).second);  // one for each
      }
    }
    return events.at(ticket);
  }
};

std::vector<UcxItem> whole() {
  std::vector<UcxItem> items;
  for (std::size_t at = 0; at < kRegionBytes; at += kItemBytes) {
    items.push_back({at, at, kItemBytes});
  }
  return items;
}

void a_part_that_is_not_one_is_refused(const std::string& packed) {
  for (std::size_t n = 0; n < packed.size(); ++n) {
    kvstrata::UcxPeer peer;
    std::string error;
    CHECK(!read_ucx_peer(packed.substr(0, n), "", kRegionBytes, &peer, &error));
    CHECK(!error.empty());
  }
  for (std::size_t i = 0; i < packed.size(); ++i) {
    std::string damaged = packed;
    damaged[i] = static_cast<char>(damaged[i] ^ 0xff);
    kvstrata::UcxPeer peer;
    std::string error;
    (void)read_ucx_peer(damaged, "", kRegionBytes, &peer, &error);  // must only not read outside
  }
  kvstrata::UcxPeer peer;
  std::string error;
  CHECK(!read_ucx_peer(packed, "", ~std::uint64_t{0}, &peer, &error));
}

// Changes a peer's description at random, in the bytes that we wrote and not in those of UCX: the
// connection is refused, or it is made and its reads end.
void changed_metadata_end_as_errors(Side& reader, const std::string& packed, std::uint64_t seed,
                                    std::uint64_t* ticket, std::uint64_t* connection) {
  std::uint64_t state = seed;
  const auto below = [&state](std::uint64_t end) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (state >> 33) % end;
  };
  // version, sized: boot id, secret, address; then the memory's address and sized key.
  std::vector<std::size_t> ours{0};
  std::size_t at = 4;
  const auto skip = [&] {
    std::uint32_t n = 0;
    std::memcpy(&n, packed.data() + at, sizeof(n));
    ours.push_back(at);
    at += sizeof(n) + n;
  };
  for (int i = 0; i < 3; ++i)
    skip();
  at += 8;
  skip();
  for (int round = 0; round < 200; ++round) {
    std::string changed = packed;
    std::uint64_t bytes = kRegionBytes;
    if (below(4) == 0) bytes = below(2) ? ~std::uint64_t{0} : below(9000);
    if (below(2) == 0) changed[ours[below(ours.size())] + below(4)] ^= 1 << below(8);
    if (below(4) == 0) changed.resize(below(changed.size() + 1));
    if (below(8) == 0) changed += changed.substr(below(changed.size() + 1));
    reader.engine->connect(++*ticket, ++*connection, changed, bytes);
    const UcxEnd end = reader.wait(*ticket).end;
    CHECK(end == UcxEnd::kDone || end == UcxEnd::kFailed || end == UcxEnd::kNoWay);
    const std::uint64_t offset = below(2) == 0 ? 0 : ~std::uint64_t{0} - below(100);
    reader.engine->read(++*ticket, *connection, {{offset, 0, 1 + below(9000)}});
    const UcxEnd read = reader.wait(*ticket).end;
    CHECK(end == UcxEnd::kDone ? read != UcxEnd::kNotConnected : read == UcxEnd::kNotConnected);
    if (end == UcxEnd::kDone && offset > 0) CHECK(read == UcxEnd::kFailed);
    reader.engine->disconnect(++*ticket, *connection);
    CHECK(reader.wait(*ticket).end == UcxEnd::kDone);
  }
}

void every_command_has_its_one_end(const std::string& library, const std::string& tls) {
  Side owner(library, tls), reader(library, tls);
  for (std::size_t i = 0; i < kRegionBytes; ++i) {
    owner.memory[i] = static_cast<unsigned char>(i * 7 + (i >> 12));
  }
  const std::string packed = owner.wait(0).text;
  CHECK(owner.wait(0).end == UcxEnd::kDone);
  CHECK(reader.wait(0).end == UcxEnd::kDone);
  a_part_that_is_not_one_is_refused(packed);

  std::uint64_t ticket = 1;
  reader.engine->connect(ticket, 1, "garbage", kRegionBytes);
  CHECK(reader.wait(ticket).end == UcxEnd::kFailed);
  reader.engine->read(++ticket, 1, whole());
  CHECK(reader.wait(ticket).end == UcxEnd::kNotConnected);
  for (std::uint64_t connection = 2; connection < 8; ++connection) {
    reader.engine->connect(++ticket, connection, packed, kRegionBytes);
    CHECK(reader.wait(ticket).end == UcxEnd::kDone);
    std::memset(reader.memory.data(), 0, kRegionBytes);
    reader.engine->read(++ticket, connection, whole());
    CHECK(reader.wait(ticket).end == UcxEnd::kDone);
    CHECK(std::memcmp(reader.memory.data(), owner.memory.data(), kRegionBytes) == 0);
    const std::uint64_t first = ticket + 1;
    for (int i = 0; i < 8; ++i)
      reader.engine->read(++ticket, connection, whole());
    for (std::uint64_t read = first; read < first + 4; ++read)
      reader.engine->cancel(read);
    if (connection % 3 == 0) (void)reader.wait(first + 5);
    const std::uint64_t disconnect = ++ticket;
    reader.engine->disconnect(disconnect, connection);
    CHECK(reader.wait(disconnect).end == UcxEnd::kDone);
    for (std::uint64_t read = first; read < disconnect; ++read) {
      CHECK(reader.events.count(read) == 1);  // before that of disconnect
      CHECK(reader.events[read].end <= UcxEnd::kCancelled);
    }
    // Nothing is written after the end.
    std::memset(reader.memory.data(), 1, kRegionBytes);
    reader.engine->connect(++ticket, connection + 100, packed, kRegionBytes);
    reader.engine->read(++ticket, connection + 100, {{0, 0, 1}});
    CHECK(reader.wait(ticket).end == UcxEnd::kDone);
    for (std::size_t i = 1; i < kRegionBytes; ++i)
      CHECK(reader.memory[i] == 1);
  }
  std::uint64_t changed = 10'000;
  changed_metadata_end_as_errors(reader, packed, /*seed=*/tls.size(), &ticket, &changed);
  // Closed in mid-read, the owner first or the reader first.
  std::uint64_t close = ++ticket + 8;
  reader.engine->connect(ticket, 1000, packed, kRegionBytes);
  for (int i = 0; i < 7; ++i)
    reader.engine->read(++ticket, 1000, whole());
  if (tls == "tcp") owner.engine->close();
  reader.engine->begin_close(close);
  (void)reader.wait(close);
  for (std::uint64_t read = close - 7; read < close; ++read)
    CHECK(reader.events.count(read) == 1);
  reader.engine->close();
}

}  // namespace

int main(int count, char** words) {
  CHECK(count == 3);
  {
    kvstrata::UcxOptions options;
    options.library = "/nowhere/libucp.so.0";
    UcxEngine none(std::move(options));
    pollfd fd{none.event_fd(), POLLIN, 0};
    CHECK(poll(&fd, 1, 60'000) == 1);
    CHECK(none.take_events().at(0).end == UcxEnd::kFailed);
  }
  for (int round = 0; round < 3; ++round)
    every_command_has_its_one_end(words[1], words[2]);
  std::puts("ok");
}
