// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "library.h"

#include <dlfcn.h>

namespace kvstrata {

bool UcxLibrary::load(const std::string& path, std::string* error) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    *error = dlerror();
    return false;
  }
#define KVSTRATA_FIND(name)                                           \
  name = reinterpret_cast<decltype(name)>(dlsym(handle, #name));      \
  if (name == nullptr) {                                              \
    *error = path + " has no " #name "; UCX 1.16 or newer is needed"; \
    return false;                                                     \
  }
  KVSTRATA_UCX_FUNCTIONS(KVSTRATA_FIND)
#undef KVSTRATA_FIND
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  if (major != 1 || minor < 16) {
    *error = path + " is libucp " + std::to_string(major) + "." + std::to_string(minor) +
             "; UCX 1.16 or newer is needed";
    return false;
  }
  return true;
}

}  // namespace kvstrata
