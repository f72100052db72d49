// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "hash/sha256.h"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

std::string hex(const Digest& d) {
  static const char* digits = "0123456789abcdef";
  std::string s;
  for (const unsigned char b : d) {
    s += digits[b >> 4];
    s += digits[b & 15];
  }
  return s;
}

std::string hash(const std::string& text) {
  return hex(sha256(text.data(), text.size()));
}

template <typename Body>
void for_every_path(Body body) {
  for (int i = 0; i < kSha256PathCount; ++i) {
    const auto path = static_cast<Sha256Path>(i);
    if (!sha256_path_supported(path)) {
      CHECK(sha256_set_path(path).code() == StatusCode::kUnsupported);
      continue;
    }
    CHECK_OK(sha256_set_path(path));
    CHECK(sha256_path() == path);
    body();
  }
  sha256_reset_path();
}

Digest filled(unsigned char value) {
  Digest d;
  d.fill(value);
  return d;
}

std::vector<unsigned char> joined(const Digest& start, const std::uint32_t* tokens, std::size_t n) {
  std::vector<unsigned char> bytes(start.begin(), start.end());
  for (std::size_t i = 0; i < n; ++i) {
    for (int shift = 0; shift < 32; shift += 8) {
      bytes.push_back(static_cast<unsigned char>(tokens[i] >> shift));
    }
  }
  return bytes;
}

}  // namespace

TEST(published_examples) {
  for_every_path([] {
    CHECK_EQ(hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ(hash(std::string(1'000'000, 'a')),
             "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  });
}

TEST(messages_that_end_around_the_place_of_the_length) {
  struct Example {
    std::size_t n;
    const char* digest;
  };
  const Example examples[] = {
      // of n times 'a'
      {54, "a3f01b6939256127582ac8ae9fb47a382a244680806a3f613a118851c1ca1d47"},
      {55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
      {56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
      {63, "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34"},
      {64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
      {119, "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb"},
      {120, "2f3d335432c70b580af0e8e1b3674a7c020d683aa5f73aaaedfdc55af904c21c"},
  };
  for_every_path([&] {
    for (const Example& e : examples) {
      CHECK_EQ(hash(std::string(e.n, 'a')), e.digest);
    }
  });
}

TEST(all_paths_agree_on_every_length) {
  std::mt19937_64 random(1);
  std::vector<unsigned char> bytes(700);
  for (auto& b : bytes) {
    b = static_cast<unsigned char>(random());
  }
  std::vector<std::vector<std::string>> seen;
  for_every_path([&] {
    seen.emplace_back();
    for (std::size_t n = 0; n + 3 < bytes.size(); ++n) {
      seen.back().push_back(hex(sha256(bytes.data() + n % 4, n)));
    }
  });
  for (const auto& list : seen) {
    CHECK(list == seen[0]);
  }
}

TEST(a_chain_key_is_the_hash_of_the_one_before_and_the_tokens) {
  std::mt19937_64 random(2);
  for_every_path([&] {
    for (const std::size_t chunk : {1u, 7u, 8u, 16u, 256u}) {
      std::vector<std::uint32_t> tokens(chunk * 5 + chunk - 1);
      for (auto& t : tokens) {
        t = static_cast<std::uint32_t>(random());
      }
      std::vector<Digest> keys(tokens.size() / chunk);
      chain_keys(filled(9), tokens, chunk, {}, keys.data());
      Digest previous = filled(9);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const auto message = joined(previous, tokens.data() + i * chunk, chunk);
        previous = sha256(message.data(), message.size());
        CHECK(keys[i] == previous);
      }
    }
  });
}

TEST(extras_are_hashed_behind_their_chunk_only) {
  const std::vector<std::uint32_t> tokens(16 * 4, 5);
  const std::vector<ChunkExtra> extras = {{1, filled(1)}, {3, filled(2)}};
  std::vector<Digest> plain(4);
  std::vector<Digest> keys(4);
  chain_keys(filled(0), tokens, 16, {}, plain.data());
  chain_keys(filled(0), tokens, 16, extras, keys.data());
  CHECK(keys[0] == plain[0]);
  CHECK(keys[1] != plain[1]);
  auto message = joined(keys[2], tokens.data() + 48, 16);
  message.insert(message.end(), 32, 2);
  CHECK(keys[3] == sha256(message.data(), message.size()));
}

Digest of_two(const Digest& first, const Digest& second) {
  unsigned char message[64];
  std::memcpy(message, first.data(), 32);
  std::memcpy(message + 32, second.data(), 32);
  return sha256(message, sizeof message);
}

TEST(storage_keys_come_chunk_by_chunk) {
  const std::vector<Digest> chain = {filled(1), filled(2), filled(3)};
  for (const std::size_t n_slices : {1, 2, 16, 17, 40}) {
    std::vector<Digest> slices;
    for (std::size_t j = 0; j < n_slices; ++j)
      slices.push_back(filled(static_cast<unsigned char>(8 + j)));
    std::vector<Digest> keys(3 * n_slices);
    for_every_path([&] {
      storage_keys(filled(7), chain, slices, keys.data());
      for (std::size_t i = 0; i < 3; ++i) {
        for (std::size_t j = 0; j < n_slices; ++j)
          CHECK(keys[n_slices * i + j] == of_two(chain[i], of_two(filled(7), slices[j])));
      }
    });
  }
}

TEST(less_than_a_chunk_has_no_key) {
  const std::vector<std::uint32_t> tokens(15);
  chain_keys(filled(0), tokens, 16, {}, nullptr);
  chain_keys(filled(0), {}, 16, {}, nullptr);
}
