// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <system_error>

#include "base/threads.h"
#include "connection.h"

namespace kvstrata {

namespace {

// How long the thread polls before it sleeps while operations are under way: polling is cheaper
// than a wake-up.
constexpr std::chrono::microseconds kSpin{50};
// How long the thread sleeps at most while operations are under way: not every transport wakes a
// thread that waits for its descriptor.
constexpr int kLookAgainMs = 1;

bool lies_within(std::uint64_t offset, std::uint64_t length, std::uint64_t whole) {
  return length <= whole && offset <= whole - length;
}

}  // namespace

UcxEngine::UcxEngine(UcxOptions options) : options_(std::move(options)) {
  for (EventFd* const event : {&event_, &wake_}) {
    if (const Status status = event->open(); !status.ok())
      throw std::system_error(static_cast<int>(status.detail(0)), std::generic_category(),
                              status.message());
  }
  thread_ = start_thread([this] { run(); });
}

UcxEngine::~UcxEngine() {
  close();
}

std::vector<UcxEvent> UcxEngine::take_events() {
  const std::lock_guard lock(mutex_);
  event_.drain();
  return std::exchange(events_, {});
}

void UcxEngine::tell(std::uint64_t ticket, UcxEnd end, std::string text) {
  const std::lock_guard lock(mutex_);
  events_.push_back({ticket, end, std::move(text)});
  if (events_.size() == 1) event_.signal();
}

void UcxEngine::submit(Command command) {
  const std::lock_guard lock(mutex_);
  commands_.push_back(std::move(command));
  if (commands_.size() == 1) wake_.signal();
}

void UcxEngine::connect(std::uint64_t ticket, std::uint64_t connection, std::string packed,
                        std::uint64_t memory_bytes) {
  submit({Command::Kind::kConnect, ticket, connection, std::move(packed), memory_bytes, {}});
}

void UcxEngine::read(std::uint64_t ticket, std::uint64_t connection, std::vector<UcxItem> items) {
  submit({Command::Kind::kRead, ticket, connection, {}, 0, std::move(items)});
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
}

std::string UcxEngine::why(const std::string& what, ucs_status_t status) {
  return what + ": " + ucx_.ucs_status_string(status);
}

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
  secret_.resize(kUcxSecretBytes);
  if (getrandom(secret_.data(), kUcxSecretBytes, 0) != static_cast<ssize_t>(kUcxSecretBytes)) {
    *error = "the kernel gives no random bytes";
    return UcxEnd::kFailed;
  }
  UcxPeer self;
  self.secret = secret_;

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  status = ucx_.ucp_worker_create(context_, &worker_params, &server_);
  if (status == UCS_OK) status = ucx_.ucp_worker_get_efd(server_, &server_fd_);
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kUcxRequestId;
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
  self.address.assign(reinterpret_cast<const char*>(address), address_bytes);
  ucx_.ucp_worker_release_address(server_, address);

  ucp_mem_map_params_t map{};
  map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                   UCP_MEM_MAP_PARAM_FIELD_PROT;
  map.address = reinterpret_cast<void*>(options_.memory);
  map.length = options_.memory_bytes;
  // A peer gets the memory's key, and reads are all that it needs; without these flags the key
  // allows writes too.
  map.prot =
      UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_READ;
  status = ucx_.ucp_mem_map(context_, &map, &memory_);
  void* key = nullptr;
  std::size_t key_bytes = 0;
  if (status != UCS_OK) {
    memory_ = nullptr;
  } else {
    status = ucx_.ucp_rkey_pack(context_, memory_, &key, &key_bytes);
  }
  if (status != UCS_OK) {
    *error = why("the memory cannot be registered; if memory may not be locked, raise ulimit -l",
                 status);
    return UcxEnd::kFailed;
  }
  self.memory = options_.memory;
  self.key.assign(static_cast<const char*>(key), key_bytes);
  ucx_.ucp_rkey_buffer_release(key);
  tell(0, UcxEnd::kDone, pack_ucx_peer(self, boot_id_));
  return UcxEnd::kDone;
}

void UcxEngine::tear_down() {
  if (server_ != nullptr) ucx_.ucp_worker_destroy(server_);
  if (memory_ != nullptr) ucx_.ucp_mem_unmap(context_, memory_);
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
      busy = true;  // run() ends after the last connection
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

// Sleeps until a command arrives or a worker may have made progress.
void UcxEngine::rest(bool recently_busy) {
  std::vector<pollfd> fds{{wake_.fd(), POLLIN, 0}};
  bool watched = server_ != nullptr, ending = false;
  if (watched) {
    if (posted_ > 0 || recently_busy) {
      for (const auto until = std::chrono::steady_clock::now() + kSpin;
           std::chrono::steady_clock::now() < until;) {
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
    wake_.drain();
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
            return lies_within(item.remote_offset, item.length, connection.memory_bytes) &&
                   lies_within(item.local_offset, item.length, options_.memory_bytes);
          })) {
        tell(command.ticket, UcxEnd::kFailed, "an item leaves the memory");
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

}  // namespace kvstrata
