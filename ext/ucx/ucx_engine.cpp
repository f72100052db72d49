// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "ucx_engine.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <span>
#include <string_view>
#include <unordered_map>

namespace kvstrata {

namespace {

using Clock = std::chrono::steady_clock;

// Of one read, so that what is left of it at its deadline is never begun.
constexpr std::size_t kWindow = 64;
// While something is under way, looking again is cheaper than being woken.
constexpr std::chrono::microseconds kSpin{50};
// Not every transport wakes who waits for it.
constexpr int kLookAgainMs = 1;
// After that the connection's worker is destroyed over what has not ended.
constexpr std::chrono::seconds kForceAfter{2};
constexpr std::size_t kMostTransports = 16;
constexpr std::uint32_t kPeerVersion = 1;
// Messages are copied through buffers of this size.
constexpr std::uint64_t kMessageBytes = 256 << 10;
constexpr unsigned kRequestId = 1, kReplyId = 2;
constexpr std::size_t kSecretBytes = 16;

struct Request {
  char secret[kSecretBytes];
  std::uint64_t token, address, length;
};

struct Reply {
  std::uint64_t token, length;  // 0: refused
};

void append(std::string* to, const void* bytes, std::size_t n) {
  to->append(static_cast<const char*>(bytes), n);
}

template <typename T>
void append_number(std::string* to, T number) {
  append(to, &number, sizeof(number));
}

void append_sized(std::string* to, const void* bytes, std::size_t n) {
  append_number(to, static_cast<std::uint32_t>(n));
  append(to, bytes, n);
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}
  template <typename T>
  bool number(T* out) {
    if (left_.size() < sizeof(T)) return false;
    std::memcpy(out, left_.data(), sizeof(T));
    left_.remove_prefix(sizeof(T));
    return true;
  }
  bool sized(std::string* out) {
    std::uint32_t n = 0;
    if (!number(&n) || left_.size() < n) return false;
    out->assign(left_.substr(0, n));
    left_.remove_prefix(n);
    return true;
  }
  bool at_end() const { return left_.empty(); }

 private:
  std::string_view left_;
};

bool lies_within(std::uint64_t offset, std::uint64_t length, std::uint64_t whole) {
  return length <= whole && offset <= whole - length;
}

bool is_kernel_copy(std::string_view transport) {
  return transport == "cma" || transport == "xpmem" || transport == "knem";
}

bool is_shared_memory(std::string_view transport) {
  return transport == "posix" || transport == "sysv" || transport == "self";
}

// What UCX would emulate ucp_get over.
bool only_sends(std::string_view transport) {
  return transport == "tcp" || transport.starts_with("ud") || is_shared_memory(transport);
}

void add_to(int eventfd) {
  const std::uint64_t one = 1;
  // Fails only when it is readable anyway.
  [[maybe_unused]] const ssize_t n = ::write(eventfd, &one, sizeof(one));
}

void reset(int eventfd) {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(eventfd, &count, sizeof(count));
}

}  // namespace

bool read_ucx_peer(const std::string& packed, const std::string& boot_id,
                   std::span<const std::uint64_t> region_bytes, UcxPeer* peer, std::string* error) {
  Reader reader(packed);
  std::uint32_t version = 0, regions = 0;
  std::string its_boot_id;
  bool whole = reader.number(&version) && version == kPeerVersion && reader.sized(&its_boot_id) &&
               reader.sized(&peer->secret) && peer->secret.size() == kSecretBytes &&
               reader.sized(&peer->address) && !peer->address.empty() && reader.number(&regions);
  if (whole && regions != region_bytes.size()) {
    *error = "names " + std::to_string(region_bytes.size()) + " regions, and its engine's part " +
             std::to_string(regions);
    return false;
  }
  for (std::uint32_t i = 0; whole && i < regions; ++i) {
    UcxPeer::Region region;
    region.length = region_bytes[i];
    whole = reader.number(&region.address) && reader.sized(&region.key) && !region.key.empty();
    if (whole && region.length > ~std::uint64_t{0} - region.address) {
      *error = "region " + std::to_string(i) + " of " + std::to_string(region.length) +
               " bytes ends behind the last address";
      return false;
    }
    peer->regions.push_back(std::move(region));
  }
  if (!whole || !reader.at_end()) {
    *error = "the engine's part is cut, or of another version";
    return false;
  }
  peer->same_host = !boot_id.empty() && its_boot_id == boot_id;
  return true;
}

struct UcxEngine::Command {
  enum class Kind { kConnect, kRead, kCancel, kDisconnect, kClose };
  Kind kind;
  std::uint64_t ticket = 0, connection = 0;
  std::string packed;
  std::vector<std::uint64_t> region_bytes;  // of the peer
  std::vector<UcxItem> items;
};

struct UcxEngine::Read {
  UcxEngine* engine;
  Connection* connection;
  std::uint64_t ticket;
  std::vector<UcxItem> items;
  std::size_t next = 0, posted = 0;
  std::uint64_t begun_bytes = 0;  // of items[next], where it takes several messages
  ucs_status_t status = UCS_OK;
  bool stopped = false, moved = false;
};

struct UcxEngine::Connection {
  UcxEngine* engine;
  ucp_worker_h worker = nullptr;
  int fd = -1;
  ucp_ep_h endpoint = nullptr;
  bool guarded = false, messages = false, broken = false, ending = false;
  Clock::time_point force_at;
  void* closing = nullptr;             // request
  std::vector<std::uint64_t> tickets;  // of disconnects
  std::vector<UcxPeer::Region> regions;
  std::vector<ucp_rkey_h> keys;
  std::string secret;
  std::list<Read> reads;
  struct Wanted {
    Read* read;
    void* destination;
    std::size_t length;
  };
  std::unordered_map<std::uint64_t, Wanted> wanted;  // by token
};

struct UcxEngine::Transports {
  std::string names;
  bool only_kernel_copies = false, one_sided = false;
};

UcxEngine::UcxEngine(UcxOptions options) : options_(std::move(options)) {
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  thread_ = std::thread([this] { run(); });
}

UcxEngine::~UcxEngine() {
  close();
}

std::vector<UcxEvent> UcxEngine::take_events() {
  const std::lock_guard lock(mutex_);
  reset(event_fd_);
  return std::exchange(events_, {});
}

void UcxEngine::tell(std::uint64_t ticket, UcxEnd end, std::string text) {
  const std::lock_guard lock(mutex_);
  events_.push_back({ticket, end, std::move(text)});
  if (events_.size() == 1) add_to(event_fd_);
}

void UcxEngine::submit(Command command) {
  const std::lock_guard lock(mutex_);
  commands_.push_back(std::move(command));
  if (commands_.size() == 1) add_to(wake_fd_);
}

void UcxEngine::connect(std::uint64_t ticket, std::uint64_t connection, std::string packed,
                        std::vector<std::uint64_t> region_bytes) {
  submit({Command::Kind::kConnect,
          ticket,
          connection,
          std::move(packed),
          std::move(region_bytes),
          {}});
}

void UcxEngine::read(std::uint64_t ticket, std::uint64_t connection, std::vector<UcxItem> items) {
  submit({Command::Kind::kRead, ticket, connection, {}, {}, std::move(items)});
}

void UcxEngine::cancel(std::uint64_t read_ticket) {
  submit({Command::Kind::kCancel, read_ticket, 0, {}, {}, {}});
}

void UcxEngine::disconnect(std::uint64_t ticket, std::uint64_t connection) {
  submit({Command::Kind::kDisconnect, ticket, connection, {}, {}, {}});
}

void UcxEngine::begin_close(std::uint64_t ticket) {
  submit({Command::Kind::kClose, ticket, 0, {}, {}, {}});
}

void UcxEngine::close() {
  if (!thread_.joinable()) return;
  begin_close(0);
  thread_.join();
  ::close(event_fd_);
  ::close(wake_fd_);
  event_fd_ = wake_fd_ = -1;
}

std::string UcxEngine::why(const std::string& what, ucs_status_t status) {
  return what + ": " + ucx_.ucs_status_string(status);
}

// --- the thread ---------------------------------------------------------------------------------

void UcxEngine::run() {
  std::string error;
  const UcxEnd opened = set_up(&error);
  if (opened == UcxEnd::kDone) {
    bool recently_busy = false;
    while (!closing_ || !connections_.empty()) {
      const bool busy = progress();
      if (!busy) rest(recently_busy);
      recently_busy = busy;
    }
  } else {
    tell(0, opened, error);
    while (!closing_) {
      if (!take_commands()) rest(false);
    }
  }
  tear_down();
  tell(close_ticket_, UcxEnd::kDone);
}

UcxEnd UcxEngine::set_up(std::string* error) {
  if (!ucx_.load(options_.library, error)) return UcxEnd::kFailed;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id_;
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx_.ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    *error = why("the settings in the environment (UCX_…) cannot be read", status);
    return UcxEnd::kFailed;
  }
  for (const auto& [name, value] : options_.config) {
    status = ucx_.ucp_config_modify(config, name.c_str(), value.c_str());
    if (status != UCS_OK) {
      *error = why("UCX does not take " + name + "=" + value, status);
      ucx_.ucp_config_release(config);
      return UcxEnd::kFailed;
    }
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "kvstrata";
  status = ucx_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  ucx_.ucp_config_release(config);
  if (status != UCS_OK) {
    context_ = nullptr;
    *error =
        why("UCX finds no transport that its settings allow (UCX_TLS, UCX_NET_DEVICES)", status);
    return status == UCS_ERR_NO_DEVICE ? UcxEnd::kNoWay : UcxEnd::kFailed;
  }
  std::string packed;
  append_number(&packed, kPeerVersion);
  append_sized(&packed, boot_id_.data(), boot_id_.size());
  secret_.resize(kSecretBytes);
  if (getrandom(secret_.data(), kSecretBytes, 0) != static_cast<ssize_t>(kSecretBytes)) {
    *error = "the kernel gives no random bytes";
    return UcxEnd::kFailed;
  }
  append_sized(&packed, secret_.data(), secret_.size());

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  status = ucx_.ucp_worker_create(context_, &worker_params, &server_);
  if (status == UCS_OK) status = ucx_.ucp_worker_get_efd(server_, &server_fd_);
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kRequestId;
  handler.cb = &on_request;
  handler.arg = this;
  if (status == UCS_OK) status = ucx_.ucp_worker_set_am_recv_handler(server_, &handler);
  ucp_address_t* address = nullptr;
  std::size_t address_bytes = 0;
  if (status == UCS_OK) status = ucx_.ucp_worker_get_address(server_, &address, &address_bytes);
  if (status != UCS_OK) {
    *error = why("UCX's worker cannot be made", status);
    return UcxEnd::kFailed;
  }
  append_sized(&packed, address, address_bytes);
  ucx_.ucp_worker_release_address(server_, address);

  append_number(&packed, static_cast<std::uint32_t>(options_.regions.size()));
  for (const UcxRegion& region : options_.regions) {
    ucp_mem_map_params_t map{};
    map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    map.address = reinterpret_cast<void*>(region.address);
    map.length = region.length;
    ucp_mem_h memory = nullptr;
    status = ucx_.ucp_mem_map(context_, &map, &memory);
    void* key = nullptr;
    std::size_t key_bytes = 0;
    if (status == UCS_OK) {
      memory_.push_back(memory);
      status = ucx_.ucp_rkey_pack(context_, memory, &key, &key_bytes);
    }
    if (status != UCS_OK) {
      *error = why("a region cannot be registered; if memory may not be locked, raise ulimit -l",
                   status);
      return UcxEnd::kFailed;
    }
    append_number(&packed, region.address);
    append_sized(&packed, key, key_bytes);
    ucx_.ucp_rkey_buffer_release(key);
  }
  tell(0, UcxEnd::kDone, std::move(packed));
  return UcxEnd::kDone;
}

void UcxEngine::tear_down() {
  if (server_ != nullptr) ucx_.ucp_worker_destroy(server_);
  for (ucp_mem_h memory : memory_)
    ucx_.ucp_mem_unmap(context_, memory);
  if (context_ != nullptr) ucx_.ucp_cleanup(context_);
}

bool UcxEngine::progress() {
  bool busy = take_commands();
  busy |= ucx_.ucp_worker_progress(server_) != 0;
  for (auto it = connections_.begin(); it != connections_.end();) {
    Connection& connection = *it->second;
    if (connection.worker != nullptr) busy |= ucx_.ucp_worker_progress(connection.worker) != 0;
    if (look_after(connection)) {
      ++it;
    } else {
      it = connections_.erase(it);
      busy = true;  // it may have been the last one
    }
  }
  while (!moved_.empty()) {
    Read& read = *moved_.back();
    moved_.pop_back();
    read.moved = false;
    advance(read);
    busy = true;
  }
  return busy;
}

// Waits until there may be something to do.
void UcxEngine::rest(bool recently_busy) {
  std::vector<pollfd> fds{{wake_fd_, POLLIN, 0}};
  bool watched = server_ != nullptr, ending = false;
  if (watched) {
    if (posted_ > 0 || recently_busy) {
      for (const auto until = Clock::now() + kSpin; Clock::now() < until;) {
        if (progress()) return;
      }
    }
    fds.push_back({server_fd_, POLLIN, 0});
    watched = ucx_.ucp_worker_arm(server_) == UCS_OK;
    for (const auto& [number, connection] : connections_) {
      if (connection->worker == nullptr) continue;
      ending |= connection->ending;
      fds.push_back({connection->fd, POLLIN, 0});
      watched = watched && ucx_.ucp_worker_arm(connection->worker) == UCS_OK;
    }
    if (!watched) return;
  }
  poll(fds.data(), fds.size(), posted_ > 0 || ending ? kLookAgainMs : -1);
}

bool UcxEngine::take_commands() {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    if (commands_.empty()) return false;
    commands.swap(commands_);
    reset(wake_fd_);
  }
  for (Command& command : commands)
    obey(command);
  return true;
}

void UcxEngine::obey(Command& command) {
  const auto found = connections_.find(command.connection);
  switch (command.kind) {
    case Command::Kind::kConnect:
      if (server_ == nullptr || closing_) {
        tell(command.ticket, UcxEnd::kCancelled);
      } else {
        make_connection(command);
      }
      break;
    case Command::Kind::kRead: {
      if (found == connections_.end() || found->second->ending) {
        const bool gone = found != connections_.end() && found->second->broken;
        tell(command.ticket, gone ? UcxEnd::kPeerGone : UcxEnd::kNotConnected);
        break;
      }
      Connection& connection = *found->second;
      if (!std::ranges::all_of(command.items, [&](const UcxItem& item) {
            return item.remote_region < connection.regions.size() &&
                   item.local_region < options_.regions.size() &&
                   lies_within(item.remote_offset, item.length,
                               connection.regions[item.remote_region].length) &&
                   lies_within(item.local_offset, item.length,
                               options_.regions[item.local_region].length);
          })) {
        tell(command.ticket, UcxEnd::kFailed, "an item leaves its region");
        break;
      }
      connection.reads.push_back({this, &connection, command.ticket, std::move(command.items)});
      advance(connection.reads.back());
      break;
    }
    case Command::Kind::kCancel:
      for (const auto& [number, connection] : connections_) {
        for (Read& read : connection->reads) {
          if (read.ticket != command.ticket) continue;
          stop(read);
          return;
        }
      }
      break;
    case Command::Kind::kDisconnect:
      if (found == connections_.end()) {
        tell(command.ticket, UcxEnd::kDone);
      } else {
        found->second->tickets.push_back(command.ticket);
        begin_end(*found->second);
      }
      break;
    case Command::Kind::kClose:
      closing_ = true;
      if (command.ticket != 0) close_ticket_ = command.ticket;
      for (const auto& [number, connection] : connections_)
        begin_end(*connection);
      break;
  }
}

// --- connections --------------------------------------------------------------------------------

void UcxEngine::make_connection(const Command& command) {
  UcxPeer peer;
  std::string error;
  if (!read_ucx_peer(command.packed, boot_id_, command.region_bytes, &peer, &error)) {
    tell(command.ticket, UcxEnd::kFailed, error);
    return;
  }
  auto connection = std::make_unique<Connection>();
  connection->engine = this;
  Transports used;
  bool made = peer.same_host && make_endpoint(*connection, peer, /*guarded=*/false, &error);
  if (made) used = transports(*connection);
  if (!made || !used.only_kernel_copies) {
    drop(*connection);
    made = make_endpoint(*connection, peer, /*guarded=*/true, &error);
    if (made) used = transports(*connection);
  }
  if (!made) {
    drop(*connection);
    tell(command.ticket, UcxEnd::kNoWay, error);
    return;
  }
  connection->messages = !used.one_sided;
  connection->regions = std::move(peer.regions);
  connection->secret = std::move(peer.secret);
  connections_.emplace(command.connection, std::move(connection));
  tell(command.ticket, UcxEnd::kDone, used.names + (used.one_sided ? "" : " (messages)"));
}

bool UcxEngine::make_endpoint(Connection& connection, const UcxPeer& peer, bool guarded,
                              std::string* error) {
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucs_status_t status = ucx_.ucp_worker_create(context_, &worker_params, &connection.worker);
  if (status != UCS_OK) {
    connection.worker = nullptr;
    *error = why("UCX's worker cannot be made", status);
    return false;
  }
  status = ucx_.ucp_worker_get_efd(connection.worker, &connection.fd);
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kReplyId;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = &on_reply;
  handler.arg = &connection;
  if (status == UCS_OK) status = ucx_.ucp_worker_set_am_recv_handler(connection.worker, &handler);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_NONE;
  if (guarded) {
    params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {&on_error, &connection};
  }
  connection.guarded = guarded;
  if (status == UCS_OK)
    status = ucx_.ucp_ep_create(connection.worker, &params, &connection.endpoint);
  if (status != UCS_OK) {
    connection.endpoint = nullptr;
    *error = why("UCX has no way to the peer with the transports of both sides (UCX_TLS)", status);
    return false;
  }
  for (const UcxPeer::Region& region : peer.regions) {
    ucp_rkey_h key = nullptr;
    status = ucx_.ucp_ep_rkey_unpack(connection.endpoint, region.key.data(), &key);
    if (status != UCS_OK) {
      *error = why("UCX cannot use the key of a region", status);
      return false;
    }
    connection.keys.push_back(key);
  }
  return true;
}

// Of a connection, each name once; where this libucp cannot tell there are none.
UcxEngine::Transports UcxEngine::transports(Connection& connection) {
  Transports used;
  ucp_transport_entry_t entries[kMostTransports] = {};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries;
  attributes.transports.num_entries = kMostTransports;
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  if (ucx_.ucp_ep_query(connection.endpoint, &attributes) != UCS_OK) return used;
  bool network = false;
  std::vector<std::string_view> seen;
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
    const std::string_view name = entries[i].transport_name;
    used.one_sided |= !only_sends(name);
    network |= !is_kernel_copy(name) && !is_shared_memory(name);
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) continue;
    used.names += (seen.empty() ? "" : ",") + std::string(name);
    seen.push_back(name);
  }
  used.only_kernel_copies = used.one_sided && !network;
  return used;
}

// Begins no more of a read, and ends what can be ended at once.
void UcxEngine::stop(Read& read) {
  const bool unfinished = read.next < read.items.size() || read.posted > 0;
  if (read.connection->messages) {
    // Answers that come later find nothing that they belong to.
    std::erase_if(read.connection->wanted, [&](const auto& w) { return w.second.read == &read; });
    posted_ -= read.posted;
    read.posted = 0;
  }
  read.stopped = true;
  if (unfinished && read.status == UCS_OK) read.status = UCS_ERR_CANCELED;
  if (!read.moved) {
    read.moved = true;
    moved_.push_back(&read);
  }
}

void UcxEngine::begin_end(Connection& connection) {
  if (connection.ending) return;
  connection.ending = true;
  connection.force_at = Clock::now() + kForceAfter;
  for (Read& read : connection.reads)
    stop(read);
  if (!connection.guarded) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = ucx_.ucp_ep_close_nbx(connection.endpoint, &param);
  connection.endpoint = nullptr;
  if (UCS_PTR_IS_PTR(request)) connection.closing = request;
}

// Whether the connection is still there afterwards.
bool UcxEngine::look_after(Connection& connection) {
  if (connection.broken) begin_end(connection);
  if (!connection.ending) return true;
  if (connection.closing != nullptr &&
      ucx_.ucp_request_check_status(connection.closing) != UCS_INPROGRESS) {
    ucx_.ucp_request_free(connection.closing);
    connection.closing = nullptr;
  }
  const bool over = connection.reads.empty() && connection.closing == nullptr;
  if (!over && Clock::now() < connection.force_at) return true;
  drop(connection);
  for (Read& read : connection.reads) {
    // Nothing writes for a worker that is no more.
    posted_ -= read.posted;
    read.posted = 0;
    if (read.status == UCS_OK) read.status = UCS_ERR_CANCELED;
  }
  while (!connection.reads.empty())
    finish(connection.reads.front());
  // A broken one stays for its number: who reads learns that the peer is gone.
  if (connection.tickets.empty() && !closing_) return true;
  for (const std::uint64_t ticket : connection.tickets)
    tell(ticket, UcxEnd::kDone);
  return false;
}

// Frees what UCX has of a connection.
void UcxEngine::drop(Connection& connection) {
  for (ucp_rkey_h key : connection.keys)
    ucx_.ucp_rkey_destroy(key);
  connection.keys.clear();
  connection.closing = nullptr;
  if (connection.worker != nullptr) ucx_.ucp_worker_destroy(connection.worker);
  connection.worker = nullptr;
  connection.endpoint = nullptr;
}

void UcxEngine::on_error(void* connection, ucp_ep_h /*endpoint*/, ucs_status_t /*status*/) {
  static_cast<Connection*>(connection)->broken = true;
}

// --- reads --------------------------------------------------------------------------------------

// Posts what the window lets, and tells the end of a read that has come to it.
void UcxEngine::advance(Read& read) {
  while (!read.stopped && read.next < read.items.size() && read.posted < kWindow) {
    UcxItem item = read.items[read.next];
    if (read.connection->messages) {
      item.remote_offset += read.begun_bytes;
      item.local_offset += read.begun_bytes;
      const std::uint64_t left = item.length - read.begun_bytes;
      item.length = std::min(left, kMessageBytes);
      read.begun_bytes += item.length;
      if (item.length == left) {
        read.begun_bytes = 0;
        ++read.next;
      }
    } else {
      ++read.next;
    }
    const ucs_status_t status =
        read.connection->messages ? post_request(read, item) : post_get(read, item);
    if (status == UCS_INPROGRESS) {
      ++read.posted;
      ++posted_;
    } else if (status != UCS_OK) {
      read.status = status;
      read.stopped = true;
    }
  }
  if (read.posted == 0 && (read.stopped || read.next == read.items.size())) finish(read);
}

ucs_status_t UcxEngine::post_get(Read& read, const UcxItem& item) {
  Connection& connection = *read.connection;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = &on_read;
  param.user_data = &read;
  param.memh = memory_[item.local_region];
  const std::uint64_t local = options_.regions[item.local_region].address + item.local_offset;
  void* request =
      ucx_.ucp_get_nbx(connection.endpoint, reinterpret_cast<void*>(local), item.length,
                       connection.regions[item.remote_region].address + item.remote_offset,
                       connection.keys[item.remote_region], &param);
  return UCS_PTR_IS_PTR(request) ? UCS_INPROGRESS : UCS_PTR_STATUS(request);
}

// --- messages -----------------------------------------------------------------------------------

ucs_status_t UcxEngine::post_request(Read& read, const UcxItem& item) {
  Connection& connection = *read.connection;
  Request message{};
  std::memcpy(message.secret, connection.secret.data(), kSecretBytes);
  message.token = ++last_token_;
  message.address = connection.regions[item.remote_region].address + item.remote_offset;
  message.length = item.length;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
  void* request = ucx_.ucp_am_send_nbx(connection.endpoint, kRequestId, &message, sizeof(message),
                                       nullptr, 0, &param);
  if (UCS_PTR_IS_ERR(request)) return UCS_PTR_STATUS(request);
  if (UCS_PTR_IS_PTR(request)) ucx_.ucp_request_free(request);  // it goes on
  const std::uint64_t local = options_.regions[item.local_region].address + item.local_offset;
  connection.wanted[message.token] = {&read, reinterpret_cast<void*>(local), item.length};
  return UCS_INPROGRESS;
}

// A peer's request: what it names must lie in a region of ours.
ucs_status_t UcxEngine::on_request(void* engine, const void* header, std::size_t header_bytes,
                                   void* /*data*/, std::size_t /*length*/,
                                   const ucp_am_recv_param_t* from) {
  UcxEngine& self = *static_cast<UcxEngine*>(engine);
  Request asked;
  if (header_bytes != sizeof(asked) || (from->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) {
    return UCS_OK;
  }
  std::memcpy(&asked, header, sizeof(asked));
  Reply reply{asked.token, 0};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_COPY_HEADER;
  for (std::size_t i = 0; i < self.options_.regions.size(); ++i) {
    const UcxRegion& region = self.options_.regions[i];
    if (std::memcmp(asked.secret, self.secret_.data(), kSecretBytes) == 0 &&
        asked.length <= kMessageBytes && asked.length <= region.length &&
        asked.address >= region.address &&
        asked.address - region.address <= region.length - asked.length) {
      reply.length = asked.length;
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      param.memh = self.memory_[i];
      break;
    }
  }
  void* request = self.ucx_.ucp_am_send_nbx(
      from->reply_ep, kReplyId, &reply, sizeof(reply),
      reply.length > 0 ? reinterpret_cast<void*>(asked.address) : nullptr, reply.length, &param);
  // A reader that is gone needs none.
  if (UCS_PTR_IS_PTR(request)) self.ucx_.ucp_request_free(request);
  return UCS_OK;
}

ucs_status_t UcxEngine::on_reply(void* of, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t length, const ucp_am_recv_param_t* param) {
  Connection& connection = *static_cast<Connection*>(of);
  Reply reply;
  if (header_bytes != sizeof(reply)) return UCS_OK;
  std::memcpy(&reply, header, sizeof(reply));
  const auto found = connection.wanted.find(reply.token);
  if (found == connection.wanted.end()) return UCS_OK;
  const Connection::Wanted wanted = found->second;
  connection.wanted.erase(found);
  const bool whole = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 &&
                     length == wanted.length && reply.length == wanted.length;
  if (whole) std::memcpy(wanted.destination, data, length);
  connection.engine->end_item(*wanted.read, whole ? UCS_OK : UCS_ERR_REJECTED);
  return UCS_OK;
}

void UcxEngine::on_read(void* request, ucs_status_t status, void* of) {
  Read& read = *static_cast<Read*>(of);
  read.engine->ucx_.ucp_request_free(request);
  read.engine->end_item(read, status);
}

void UcxEngine::end_item(Read& read, ucs_status_t status) {
  --read.posted;
  --posted_;
  if (status != UCS_OK) {
    // Cancelled items tell nothing of why.
    if (read.status == UCS_OK || read.status == UCS_ERR_CANCELED) read.status = status;
    read.stopped = true;
  }
  if (!read.moved) {
    read.moved = true;
    moved_.push_back(&read);
  }
}

void UcxEngine::finish(Read& read) {
  Connection& connection = *read.connection;
  assert(read.posted == 0);
  if (read.moved) std::erase(moved_, &read);
  if (read.status == UCS_OK) {
    tell(read.ticket, UcxEnd::kDone);
  } else if (read.status == UCS_ERR_CANCELED && !connection.broken) {
    tell(read.ticket, UcxEnd::kCancelled);
  } else {
    // Either the peer is gone, or memory that it had registered is; nothing more is to be had
    // there.
    connection.broken = true;
    tell(read.ticket, UcxEnd::kPeerGone, ucx_.ucs_status_string(read.status));
  }
  connection.reads.remove_if([&read](const Read& other) { return &other == &read; });
}

}  // namespace kvstrata
