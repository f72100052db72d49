// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// libucp, found at run time: a build with this code also runs on machines without libucp, and says
// what is missing.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

static_assert(UCP_API_VERSION >= UCP_VERSION(1, 16), "UCX 1.16 or newer is needed");

namespace kvstrata {

#define KVSTRATA_UCX_FUNCTIONS(X)   \
  X(ucp_am_send_nbx)                \
  X(ucp_cleanup)                    \
  X(ucp_config_modify)              \
  X(ucp_config_read)                \
  X(ucp_config_release)             \
  X(ucp_ep_close_nbx)               \
  X(ucp_ep_create)                  \
  X(ucp_ep_query)                   \
  X(ucp_ep_rkey_unpack)             \
  X(ucp_get_nbx)                    \
  X(ucp_get_version)                \
  X(ucp_init_version)               \
  X(ucp_mem_map)                    \
  X(ucp_mem_unmap)                  \
  X(ucp_request_check_status)       \
  X(ucp_request_free)               \
  X(ucp_rkey_buffer_release)        \
  X(ucp_rkey_destroy)               \
  X(ucp_rkey_pack)                  \
  X(ucp_worker_arm)                 \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_get_address)         \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_progress)            \
  X(ucp_worker_release_address)     \
  X(ucp_worker_set_am_recv_handler) \
  X(ucs_status_string)

struct UcxLibrary {
#define KVSTRATA_DECLARE(name) decltype(&::name) name = nullptr;
  KVSTRATA_UCX_FUNCTIONS(KVSTRATA_DECLARE)
#undef KVSTRATA_DECLARE

  // Loads `path`, a file or a name for the system's loader. The library stays loaded for the life
  // of the process, because libucp has threads and hooks that outlive every use. False: `error`
  // says what is wrong.
  bool load(const std::string& path, std::string* error);
};

}  // namespace kvstrata
