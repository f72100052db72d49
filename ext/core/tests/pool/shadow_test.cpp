#include "pool/shadow.h"

#include <vector>

#include "support/check.h"
#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

std::vector<SampledChunk> prompt(std::uint64_t number, std::uint32_t chunks) {
  std::vector<SampledChunk> made;
  for (std::uint32_t depth = 0; depth < chunks; ++depth)
    made.push_back({number << 20 | depth, depth});
  return made;
}

}  // namespace

TEST(a_shadow_has_what_fits_and_leaves_from_the_end_of_the_oldest_prompt) {
  Shadow shadow(10, "LRU", 0.5, true);
  CHECK_EQ(shadow.request(prompt(1, 6), kSecond), 0);
  CHECK_EQ(shadow.request(prompt(2, 4), 2 * kSecond), 0);
  CHECK_EQ(shadow.request(prompt(1, 6), 3 * kSecond), 6);
  CHECK_EQ(shadow.request(prompt(3, 2), 4 * kSecond), 0);  // for the last two chunks of prompt 2
  CHECK_EQ(shadow.request(prompt(2, 2), 5 * kSecond), 2);
  CHECK_EQ(shadow.request(prompt(4, 20), 6 * kSecond), 0);
  CHECK_EQ(shadow.request(prompt(4, 20), 7 * kSecond), 10);
  CHECK_EQ(shadow.sums().chunks, 60.0);
  CHECK_EQ(shadow.sums().hit_chunks, 18.0);
  CHECK_EQ(shadow.sums().hit_cost, (6 + 7.5) + (2 + 0.5) + (10 + 22.5));
}

TEST(forecasts_are_those_of_pools_of_these_sizes) {
  // Prompts of 4 chunks, the next one likely to be among the newest 40: the larger the pool, the
  // more hits.
  Fixture f(64, "LRU", 128);
  std::uint64_t random = 1;
  std::uint64_t hits = 0;
  std::uint64_t now = kSecond;
  for (std::uint64_t number = 0; number < 8'000; ++number) {
    random = random * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
    const auto keys = chain((number - std::min(number, (random >> 33) % 40)) + 1'000, 4);
    f.pool->set_time(now += kSecond);
    const std::size_t found = f.peek(keys);
    if (const LeaseResult lease = f.lease(keys, {0}); lease.ticket != 0)
      f.pool->release(lease.ticket, -1);
    if (number >= 4'000) hits += found;
    if (found < keys.size()) f.store(keys);
    f.pool->learn();
  }
  const std::vector<Shadows::Forecast> forecasts = f.pool->forecasts();
  CHECK_EQ(forecasts.size(), 4);
  CHECK_EQ(forecasts[1].factor, 1.0);
  const double actual = static_cast<double>(hits) / (4 * 4'000);
  CHECK(forecasts[1].hits > actual - 0.02 && forecasts[1].hits < actual + 0.02);
  CHECK(forecasts[0].hits < forecasts[1].hits - 0.05);
  CHECK(forecasts[2].hits > forecasts[1].hits + 0.05);
  CHECK(forecasts[3].hits >= forecasts[2].hits);
}
