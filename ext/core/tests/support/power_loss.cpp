// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "support/power_loss.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "record/record.h"
#include "support/amount.h"
#include "support/check.h"

namespace kvstrata::testing {

namespace {

class PowerLoss {
 public:
  PowerLoss(MakeConnector make, PowerLossOptions options,
            std::shared_ptr<SyncSites> sites = std::make_shared<SyncSites>())
      : make_(std::move(make)), options_(std::move(options)), sites_(std::move(sites)) {
    for (unsigned key = 0; key < options_.keys; ++key)
      for (unsigned version = 1; version <= kVersions; ++version)
        records_.push_back(make_record(key, version));
  }

  // The first broken promise of a story, over all its ends or one. `step` 0: the machine stops when
  // the life is over.
  std::optional<std::string> tell(std::uint64_t seed, std::uint64_t step,
                                  std::optional<unsigned> only_end = std::nullopt) {
    ++stories_;
    Random random(seed);
    World world = begin(&random, seed, step);
    const bool stopped = world.files->stopped();
    bury(&world);
    if (world.broken) return told(world, seed, step, "-");
    const std::uint64_t rest = random.next();
    for (unsigned ending = 0; ending < kEnds; ++ending) {
      if (only_end && *only_end != ending) continue;
      World branch = world;
      Random chance(rest ^ (step * kEnds + ending));
      if (static_cast<End>(ending) == End::kClose) {
        if (stopped) continue;
        Random again(seed);
        branch = begin(&again, seed, step);  // with the connector running
      }
      end(&branch, ending, chance.next());
      more_lives(&branch, ending, chance);
      if (branch.broken) return told(branch, seed, step, std::to_string(ending));
    }
    return std::nullopt;
  }

  // The steps of the life in which the machine stopped, of the last story.
  [[nodiscard]] std::uint64_t last_steps() const { return last_steps_; }
  [[nodiscard]] std::uint64_t stories() const { return stories_; }

  // Stops at every step of a seed's story.
  std::optional<std::string> tell_every_step(std::uint64_t seed) {
    if (auto broken = tell(seed, 0)) return broken;
    const std::uint64_t steps = std::min<std::uint64_t>(last_steps_, options_.max_steps);
    for (std::uint64_t step = 1; step <= steps; step += amount(2, 1))
      if (auto broken = tell(seed, step)) return broken;
    return std::nullopt;
  }

  // Stops at the end, then at steps of many seeds, as far as `stories` go.
  std::optional<std::string> tell_some(std::uint64_t seed, unsigned stories) {
    Random random(seed);
    for (unsigned story = 0; story < stories; ++seed) {
      if (auto broken = tell(seed, 0)) return broken;
      const std::uint64_t steps = std::max<std::uint64_t>(last_steps_, 1);
      for (unsigned i = 0; i < 4 && ++story < stories; ++i)
        if (auto broken = tell(seed, 1 + random.below(steps))) return broken;
    }
    return std::nullopt;
  }

  // Stops at some steps of each of many seeds, from this one on, until the time is up.
  std::optional<std::string> tell_for(std::chrono::seconds time, std::uint64_t seed) {
    constexpr unsigned kStoriesOfSeed = 5;
    const auto until = std::chrono::steady_clock::now() + time;
    for (; std::chrono::steady_clock::now() < until; ++seed)
      if (auto broken = tell_some(seed, kStoriesOfSeed)) return broken;
    return std::nullopt;
  }

  std::optional<std::string> tell_all() {
    // The gate tells about a quarter of the stories.
    for (unsigned i = 0; i < std::min(options_.whole_seeds, amount(1U, options_.whole_seeds)); ++i)
      if (auto broken = tell_every_step(options_.first_seed + i)) return broken;
    return tell_some(options_.first_seed + options_.whole_seeds,
                     options_.random_stories / amount(4, 1));
  }

 private:
  static constexpr unsigned kVersions = 3;
  static constexpr unsigned kAbsentVersion = 0;

  using Bytes = std::vector<std::uint64_t>;  // aligned as a record has to be

  struct Record {
    Digest key{};
    std::uint32_t length = 0;
    Bytes bytes;
  };

  // What may be there under a key.
  struct Known {
    std::set<unsigned> versions = {kAbsentVersion};
    std::uint64_t evictions = 0;
  };

  // The medium, and what is known about it. Once its files are stopped, copies are other ends of
  // the same story.
  struct World {
    explicit World(const PowerLossOptions& options) : known(options.keys) {}

    std::shared_ptr<VolatileFiles> files;
    std::vector<Known> known;
    // What was said until now that cannot be.
    std::optional<std::string> broken;
  };

  // One life of the connector; what its threads share.
  struct Life {
    World* world;
    Connector* connector;
    ConnectorCapabilities can;
    std::mutex mutex;  // guards world->known and world->broken
  };

  Record make_record(unsigned key, unsigned version) const {
    Record record;
    Random random(key * 1000 + 7);
    for (std::size_t i = 0; i < record.key.size(); ++i)
      record.key[i] = static_cast<unsigned char>(random.next());
    const std::uint32_t payload = options_.payload_bytes[key % options_.payload_bytes.size()] + key;
    std::uint64_t length = 0;
    CHECK(kvstrata::record_bytes(1, payload, &length).ok());
    record.length = static_cast<std::uint32_t>(length);
    record.bytes.resize(length / 8 + 1);
    auto* const bytes = reinterpret_cast<std::uint8_t*>(record.bytes.data());
    Random content(key * 1000 + version);
    for (std::uint64_t i = length - payload; i < length; ++i)
      bytes[i] = static_cast<std::uint8_t>(content.next());
    RecordSpec spec;
    spec.key = record.key;
    spec.chunk_tokens = 16;
    spec.created_unix_ms = 1;
    CHECK(seal_record(bytes, length, spec, &payload, 1).ok());
    return record;
  }

  const Record& record(unsigned key, unsigned version) const {
    return records_[key * kVersions + version - 1];
  }
  const Digest& digest(unsigned key) const { return record(key, 1).key; }
  std::optional<unsigned> key_of(const Digest& digest_wanted) const {
    for (unsigned key = 0; key < options_.keys; ++key)
      if (digest(key) == digest_wanted) return key;
    return std::nullopt;
  }

  // Tells a story up to the end of the life in which the machine stops; the connector of that life
  // is still there if it did not stop.
  World begin(Random* random, std::uint64_t seed, std::uint64_t step) {
    World world(options_);
    world.files = std::make_shared<VolatileFiles>(options_.files, sites_);
    CHECK_OK(world.files->make_folder(kPowerLossFolder));
    world.files->settle();
    const std::uint64_t lives_before = seed % 3;
    for (std::uint64_t life = 0; life < lives_before && !world.broken; ++life) {
      live(&world, random->next(), 0, 1, options_.batches);
      end(&world, static_cast<unsigned>(random->below(kEnds)), random->next());
    }
    if (world.broken) return world;
    const std::uint64_t steps = world.files->steps();
    live(&world, random->next(), step, options_.threads, options_.batches);
    last_steps_ = world.files->steps() - steps;
    return world;
  }

  // ---- lives -------------------------------------------------------------------------------

  // Opens the connector, looks at what is there, and uses it until the machine stops or the life is
  // over.
  void live(World* world, std::uint64_t seed, std::uint64_t step, unsigned threads,
            unsigned batches) {
    SyncSites::begin_here();
    VolatileFiles& files = *world->files;
    if (step != 0) files.stop_at(files.steps() + step, seed);
    Random random(seed);
    connector_ = make_(files);
    Life life{.world = world,
              .connector = connector_.get(),
              .can = connector_->capabilities(),
              .mutex = {}};
    const std::string error = connector_->open({});
    opened_ = error.empty();
    if (!opened_) {
      if (!files.stopped()) fail(&life, "open: " + error);
    } else {
      take_evicted(&life);
      if (!files.stopped()) look_at_all(&life);
      std::vector<std::thread> others;
      for (unsigned t = 1; t < threads; ++t) {
        const std::uint64_t own_seed = random.next();
        others.emplace_back(
            [&, t, own_seed] { use(&life, Random(own_seed), t, threads, batches); });
      }
      use(&life, random, 0, threads, batches);
      for (std::thread& other : others)
        other.join();
    }
    // The end of the life is chosen by the caller; the connector object lives until then.
    if (files.stopped() || world->broken) bury(world);
  }

  // The machine has stopped: the last words of the connector, then its object goes.
  void bury(World* world) {
    if (connector_ == nullptr) return;
    world->files->stop();
    Life life{.world = world, .connector = connector_.get(), .can = {}, .mutex = {}};
    // An open() that failed may have evicted.
    take_evicted(&life);
    if (opened_) {
      connector_->close();
      take_evicted(&life);
    }
    connector_.reset();
  }

  // Ends the life of a connector that may still run, and puts the files in place that are left.
  void end(World* world, unsigned ending, std::uint64_t seed) {
    if (static_cast<End>(ending) == End::kClose && connector_ != nullptr && !world->broken) {
      Life life{.world = world, .connector = connector_.get(), .can = {}, .mutex = {}};
      take_evicted(&life);
      connector_->close();
      connector_.reset();
    }
    bury(world);
    if (world->broken) return;
    if (ending <= static_cast<unsigned>(End::kCutRandom))
      world->files = world->files->cut(static_cast<Kept>(ending), seed);
    else
      world->files = world->files->kill();
  }

  void more_lives(World* world, unsigned ending, Random random) {
    if (world->broken) return;
    const bool looks_only = static_cast<End>(ending) == End::kKillCutNothing ||
                            static_cast<End>(ending) == End::kKillCutRandom;
    const std::uint64_t lives = 2 + random.below(2);
    for (std::uint64_t life = 0; life < lives && !world->broken; ++life) {
      const bool looks = (life == 0 && looks_only) || random.chance(30);
      const bool stops = !(life == 0 && looks_only) && life + 1 < lives && random.chance(50);
      live(world, random.next(), stops ? 1 + random.below(40) : 0, 1,
           looks ? 0 : 1 + static_cast<unsigned>(random.below(4)));
      unsigned next_end = static_cast<unsigned>(random.below(kEnds));
      if (life == 0 && looks_only)
        next_end = static_cast<unsigned>(
            static_cast<End>(ending) == End::kKillCutNothing ? End::kCutNothing : End::kCutRandom);
      end(world, next_end, random.next());
    }
    if (world->broken) return;
    live(world, random.next(), 0, 1, 0);
    bury(world);
  }

  // ---- what a life does ----------------------------------------------------------------------

  void use(Life* life, Random random, unsigned thread, unsigned threads, unsigned batches) {
    for (unsigned batch = 0; batch < batches; ++batch) {
      // The same for a seed whatever happens.
      const std::uint64_t what = random.below(100);
      const Random own(random.next());
      if (life->world->files->stopped() || is_broken(life)) return;
      if (what < 50)
        put(life, own, thread, threads);
      else if (what < 68)
        remove(life, own, thread, threads);
      else if (what < 82)
        load(life, own, thread, threads);
      else if (what < 97 || threads > 1 || !options_.clears || !life->can.can_clear)
        exists(life, own, thread, threads);
      else
        clear(life);
      take_evicted(life);
      check_usage(life);
    }
  }

  bool is_shared(unsigned key, unsigned threads) const {
    return threads > 1 && key < options_.keys / 2;
  }

  unsigned pick(Random* random, unsigned thread, unsigned threads, bool own) const {
    for (;;) {
      const auto key = static_cast<unsigned>(random->below(options_.keys));
      if (threads == 1 || key % threads == thread || (!own && is_shared(key, threads))) {
        if (own && is_shared(key, threads)) continue;
        return key;
      }
    }
  }

  std::size_t batch_size(Life* life, Random* random) const {
    const std::uint64_t limit = std::min(options_.max_items, life->can.max_batch);
    return 1 + random->below(limit);
  }

  void put(Life* life, Random random, unsigned thread, unsigned threads) {
    const std::size_t count = batch_size(life, &random);
    std::vector<PutItem> items(count);
    std::vector<std::pair<unsigned, unsigned>> wanted(count);  // key, version
    std::vector<std::uint64_t> evictions(count);
    for (std::size_t i = 0; i < count; ++i) {
      auto& [key, version] = wanted[i];
      key = pick(&random, thread, threads, false);
      if (i > 0 && random.chance(10)) key = wanted[i - 1].first;
      version = 1 + static_cast<unsigned>(random.below(kVersions));
      const Record& from = record(key, version);
      // The bytes go with the hold: who uses them later is found by the sanitizer.
      auto bytes = std::make_shared<Bytes>(from.bytes);
      items[i].key = from.key;
      items[i].bytes = reinterpret_cast<const std::uint8_t*>(bytes->data());
      items[i].length = from.length;
      items[i].hold = std::move(bytes);
    }
    {
      const std::lock_guard lock(life->mutex);
      for (std::size_t i = 0; i < count; ++i) {
        Known& known = life->world->known[wanted[i].first];
        evictions[i] = known.evictions;
      }
      // Another thread may find it from now on.
      for (const auto& [key, version] : wanted)
        if (is_shared(key, threads)) life->world->known[key].versions.insert(version);
    }
    std::size_t done = 0;
    while (done < count) {
      const std::size_t piece =
          std::min<std::size_t>(count - done, std::max(1U, life->can.items_per_piece));
      life->connector->put(std::span(items).subspan(done, piece));
      done += piece;
    }
    life->connector->put_end(items);
    const std::lock_guard lock(life->mutex);
    const bool stopped = life->world->files->stopped();
    std::set<unsigned> stored;
    for (std::size_t i = 0; i < count; ++i) {
      const auto [key, version] = wanted[i];
      Known& known = life->world->known[key];
      switch (items[i].status) {
        case PutStatus::kStored:
          if (is_shared(key, threads) || !stored.insert(key).second)
            known.versions.insert(version);
          else
            known.versions = {version};
          known.versions.erase(kAbsentVersion);
          break;
        case PutStatus::kExists:
          known.versions.erase(kAbsentVersion);
          if (known.versions.empty())
            fail_locked(life, "put of key " + name(key) + " said EXISTS, but nothing is there");
          break;
        case PutStatus::kThrottled:
        case PutStatus::kFailed:
          known.versions.insert(version);
          if (!stopped && !options_.may_fail)
            fail_locked(life, "put of key " + name(key) + " failed: " + items[i].reason);
          break;
      }
      if (known.evictions != evictions[i]) known.versions.insert(kAbsentVersion);
    }
  }

  void remove(Life* life, Random random, unsigned thread, unsigned threads) {
    std::vector<DeleteItem> items(batch_size(life, &random));
    std::vector<unsigned> keys(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      keys[i] = pick(&random, thread, threads, true);
      items[i].key = digest(keys[i]);
    }
    life->connector->remove(items);
    take_evicted(life);
    const std::lock_guard lock(life->mutex);
    const bool stopped = life->world->files->stopped();
    std::set<unsigned> removed;
    for (std::size_t i = 0; i < items.size(); ++i) {
      Known& known = life->world->known[keys[i]];
      if (items[i].removed) {
        if (known.versions == std::set{kAbsentVersion} && !removed.contains(keys[i]))
          fail_locked(life, "delete of key " + name(keys[i]) + " removed what was not there");
        known.versions = {kAbsentVersion};
        removed.insert(keys[i]);
        continue;
      }
      if (!stopped && !options_.may_fail && !known.versions.contains(kAbsentVersion))
        fail_locked(life, "delete of key " + name(keys[i]) + " did not remove it: it is there");
      known.versions.insert(kAbsentVersion);
    }
  }

  void clear(Life* life) {
    life->connector->clear();
    const std::lock_guard lock(life->mutex);
    const bool stopped = life->world->files->stopped();
    for (Known& known : life->world->known) {
      if (!stopped) known.versions = {kAbsentVersion};
      known.versions.insert(kAbsentVersion);
    }
  }

  void exists(Life* life, Random random, unsigned thread, unsigned threads) {
    std::vector<unsigned> keys(batch_size(life, &random));
    for (unsigned& key : keys)
      key = pick(&random, thread, threads, false);
    std::vector<ExistsItem> items;
    ask(life, keys, &items, "exists");
  }

  void load(Life* life, Random random, unsigned thread, unsigned threads) {
    std::vector<unsigned> keys(batch_size(life, &random));
    for (unsigned& key : keys)
      key = pick(&random, thread, threads, false);
    load_present(life, keys, false);
  }

  // Asks what is there, then loads it. After opening, what is found is known for good.
  void load_present(Life* life, const std::vector<unsigned>& keys, bool opening) {
    std::vector<ExistsItem> asked;
    ask(life, keys, &asked, opening ? "exists after opening" : "exists");
    std::vector<LoadItem> items;
    std::vector<unsigned> wanted;
    std::vector<std::shared_ptr<Bytes>> buffers;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (asked[i].presence != Presence::kPresent) continue;
      const std::uint32_t room = record(keys[i], 1).length + 1000;
      auto buffer = std::make_shared<Bytes>(room / 8 + 1);
      LoadItem item;
      item.key = asked[i].key;
      item.bytes = reinterpret_cast<std::uint8_t*>(buffer->data());
      item.length = room;
      item.hold = buffer;
      items.push_back(std::move(item));
      wanted.push_back(keys[i]);
      buffers.push_back(std::move(buffer));
    }
    if (items.empty() || is_broken(life)) return;
    // What another thread puts after the load may be known before the load's outcome is checked.
    std::vector<bool> may_be_absent(items.size());
    std::vector<std::uint64_t> evictions(items.size());
    {
      const std::lock_guard lock(life->mutex);
      for (std::size_t i = 0; i < items.size(); ++i) {
        const Known& known = life->world->known[wanted[i]];
        may_be_absent[i] = known.versions.contains(kAbsentVersion);
        evictions[i] = known.evictions;
      }
    }
    life->connector->load(items);
    take_evicted(life);
    const std::lock_guard lock(life->mutex);
    const bool stopped = life->world->files->stopped();
    for (std::size_t i = 0; i < items.size(); ++i) {
      const unsigned key = wanted[i];
      Known& known = life->world->known[key];
      if (items[i].status != LoadStatus::kLoaded) {
        const bool absent = items[i].status == LoadStatus::kAbsent &&
                            (may_be_absent[i] || known.evictions != evictions[i]);
        if (stopped || (!opening && absent)) continue;
        fail_locked(life, "key " + name(key) + " is PRESENT but load said " +
                              load_name(items[i].status) + " " + items[i].reason);
        continue;
      }
      const std::optional<unsigned> version = version_of(key, items[i]);
      if (!version)
        fail_locked(life, "key " + name(key) + " loaded bytes that were never put under it");
      else if (!known.versions.contains(*version))
        fail_locked(life, "key " + name(key) + " loaded version " + std::to_string(*version) +
                              " instead of " + versions_of(known));
      else if (opening)
        known.versions = {*version};
    }
  }

  void look_at_all(Life* life) {
    check_usage(life);
    const unsigned limit = std::max(1U, std::min(options_.keys, life->can.max_batch));
    std::vector<unsigned> keys;
    for (unsigned key = 0; key < options_.keys; ++key) {
      keys.push_back(key);
      if (keys.size() < limit && key + 1 < options_.keys) continue;
      load_present(life, keys, true);
      keys.clear();
    }
  }

  // ---- the model -----------------------------------------------------------------------------

  void take_evicted(Life* life) {
    const std::lock_guard lock(life->mutex);
    std::vector<Digest> evicted;
    life->connector->take_evicted(&evicted);
    for (const Digest& key : evicted) {
      const std::optional<unsigned> known_key = key_of(key);
      if (!known_key) {
        fail_locked(life, "a key was evicted that was never put");
        continue;
      }
      Known& known = life->world->known[*known_key];
      ++known.evictions;
      known.versions.insert(kAbsentVersion);
    }
  }

  // exists() of these keys, compared with what is known.
  void ask(Life* life, const std::vector<unsigned>& keys, std::vector<ExistsItem>* items,
           const char* when) {
    items->assign(keys.size(), {});
    std::vector<bool> acknowledged(keys.size());
    std::vector<std::uint64_t> evictions(keys.size());
    {
      // What another thread puts from now on may be there or not.
      const std::lock_guard lock(life->mutex);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        (*items)[i].key = digest(keys[i]);
        acknowledged[i] = !life->world->known[keys[i]].versions.contains(kAbsentVersion);
        evictions[i] = life->world->known[keys[i]].evictions;
      }
    }
    life->connector->exists(*items);
    take_evicted(life);
    const std::lock_guard lock(life->mutex);
    if (life->world->files->stopped()) return;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Known& known = life->world->known[keys[i]];
      const Presence presence = (*items)[i].presence;
      const std::string what = std::string(when) + ": key " + name(keys[i]);
      if (presence == Presence::kUnknown)
        fail_locked(life, what + " is UNKNOWN");
      else if (presence == Presence::kAbsent && acknowledged[i] &&
               known.evictions == evictions[i] && !known.versions.contains(kAbsentVersion))
        fail_locked(life, what + " is ABSENT, acknowledged was " + versions_of(known));
      else if (presence == Presence::kPresent && known.versions == std::set{kAbsentVersion})
        fail_locked(life, what + " is PRESENT, but was deleted or never put");
    }
  }

  void check_usage(Life* life) {
    const ConnectorUsage usage = life->connector->usage();
    if (usage.capacity_bytes != 0 && usage.used_bytes > usage.capacity_bytes)
      fail(life, "usage: " + std::to_string(usage.used_bytes) + " bytes of " +
                     std::to_string(usage.capacity_bytes));
  }

  std::optional<unsigned> version_of(unsigned key, const LoadItem& item) const {
    for (unsigned version = 1; version <= kVersions; ++version) {
      const Record& from = record(key, version);
      if (from.length == item.length &&
          std::memcmp(from.bytes.data(), item.bytes, item.length) == 0)
        return version;
    }
    return std::nullopt;
  }

  static std::string versions_of(const Known& known) {
    std::string text;
    for (const unsigned version : known.versions)
      text += (text.empty() ? "" : " or ") +
              (version == kAbsentVersion ? "absent" : "version " + std::to_string(version));
    return text;
  }

  std::string name(unsigned key) const {
    char text[32];
    std::snprintf(text, sizeof text, "%u (%02x%02x..)", key, digest(key)[0], digest(key)[1]);
    return text;
  }

  static const char* load_name(LoadStatus status) {
    constexpr std::array names = {"LOADED", "ABSENT", "CORRUPT", "FAILED"};
    return names.at(static_cast<std::size_t>(status));
  }

  bool is_broken(Life* life) {
    const std::lock_guard lock(life->mutex);
    return life->world->broken.has_value();
  }
  void fail(Life* life, const std::string& what) {
    const std::lock_guard lock(life->mutex);
    fail_locked(life, what);
  }
  void fail_locked(Life* life, const std::string& what) {
    if (!life->world->broken) life->world->broken = what;
  }

  std::string told(const World& world, std::uint64_t seed, std::uint64_t step,
                   const std::string& ending) const {
    if (options_.files.traces)
      for (const std::string& line : world.files->trace())
        std::fprintf(stderr, "  %s\n", line.c_str());
    return *world.broken + " [" + std::to_string(seed) + "/" + std::to_string(step) + "/" + ending +
           (ending == "-" ? "" : std::string(" ") + end_name(std::stoul(ending))) + "]";
  }

  const MakeConnector make_;
  const PowerLossOptions options_;
  const std::shared_ptr<SyncSites> sites_;
  std::vector<Record> records_;
  std::unique_ptr<Connector> connector_;  // of the life that goes on
  bool opened_ = false;
  std::uint64_t last_steps_ = 0;
  std::uint64_t stories_ = 0;
};

// `make power-loss`: each test tells stories of new seeds for so long.
struct PowerRun {
  std::chrono::seconds seconds{};
  std::uint64_t seed = 0;

  static std::optional<PowerRun> wanted() {
    const char* const seconds = std::getenv("KVSTRATA_POWER_SECONDS");
    if (seconds == nullptr) return std::nullopt;
    const char* const seed = std::getenv("KVSTRATA_POWER_SEED");
    return PowerRun{.seconds = std::chrono::seconds(std::strtoull(seconds, nullptr, 10)),
                    .seed = seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10)};
  }
};

}  // namespace

void check_power_loss(const MakeConnector& make, PowerLossOptions options) {
  std::optional<std::string> broken;
  if (const char* const story = std::getenv("KVSTRATA_POWER_STORY")) {
    unsigned long long seed = 0;
    unsigned long long step = 0;
    unsigned ending = 0;
    const int found = std::sscanf(story, "%llu/%llu/%u", &seed, &step, &ending);
    if (found < 2) fail(__FILE__, __LINE__, "KVSTRATA_POWER_STORY: not seed/step/end");
    options.files.traces = true;
    PowerLoss stories(make, options);
    broken = stories.tell(seed, step, found == 3 ? std::optional(ending) : std::nullopt);
  } else if (const auto run = PowerRun::wanted()) {
    PowerLoss stories(make, options);
    broken = stories.tell_for(run->seconds, run->seed);
    std::printf("%llu stories from seed %llu: %s\n",
                static_cast<unsigned long long>(stories.stories()),
                static_cast<unsigned long long>(run->seed),
                broken ? "A PROMISE IS BROKEN" : "no promise is broken");
  } else {
    PowerLoss stories(make, options);
    broken = stories.tell_all();
  }
  if (broken) fail(__FILE__, __LINE__, *broken);
}

void check_every_sync_matters(const MakeConnector& make, const PowerLossOptions& options) {
  if (PowerRun::wanted()) return;  // other seeds tell nothing new about that
  const auto sites = std::make_shared<SyncSites>(options.sync_depth);
  if (const auto broken = PowerLoss(make, options, sites).tell_some(options.first_seed, 30))
    fail(__FILE__, __LINE__, "with all syncs in place: " + *broken);
  std::string missed;
  // Places that are only reached without another one are left out too.
  for (std::size_t site = 0; site < sites->count(); ++site) {
    sites->forget(site);
    PowerLoss stories(make, options, sites);
    const auto caught = stories.tell_some(options.first_seed, options.sync_stories);
    std::printf("sync at %s\n    %llu stories: %s\n", sites->describe(site).c_str(),
                static_cast<unsigned long long>(stories.stories()),
                caught ? caught->c_str() : "NOT MISSED");
    if (!caught) missed += "\n  " + sites->describe(site);
  }
  if (!missed.empty()) fail(__FILE__, __LINE__, "syncs that nothing needs:" + missed);
}

}  // namespace kvstrata::testing
