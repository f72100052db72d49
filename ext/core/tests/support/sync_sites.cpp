// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cstdio>

#include "support/volatile_files.h"

namespace kvstrata::testing {

void SyncSites::begin_here() {
  std::array<void*, 64> frames{};
  outer_frames_ = ::backtrace(frames.data(), static_cast<int>(frames.size())) - 2;
}

std::size_t SyncSites::count() {
  const std::lock_guard lock(mutex_);
  return sites_.size();
}

void SyncSites::forget(std::optional<std::size_t> index) {
  const std::lock_guard lock(mutex_);
  forgotten_ = index;
}

std::string SyncSites::describe(std::size_t index) {
  std::vector<void*> site;
  {
    const std::lock_guard lock(mutex_);
    site = sites_.at(index);
  }
  std::string text;
  for (void* const address : site)
    text += (text.empty() ? "" : " < ") + describe_address(address);
  return text;
}

bool SyncSites::reached(void* caller) {
  std::vector<void*> site = {caller};
  if (depth_ > 1) add_callers(&site);
  const std::lock_guard lock(mutex_);
  auto found = std::find(sites_.begin(), sites_.end(), site);
  if (found == sites_.end()) found = sites_.insert(found, std::move(site));
  return forgotten_ != static_cast<std::size_t>(found - sites_.begin());
}

void SyncSites::add_callers(std::vector<void*>* site) const {
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  const auto end = frames.begin() + std::max(0, count - outer_frames_);
  auto at = std::find(frames.begin(), end, site->front());
  while (at != end && ++at != end && site->size() < depth_)
    site->push_back(*at);
}

std::string SyncSites::describe_address(void* address) {
  Dl_info found{};
  char text[64];
  std::snprintf(text, sizeof text, "%p", address);
  if (::dladdr(address, &found) == 0) return text;
  // The instruction before the one that is returned to.
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(address) - 1 -
                            reinterpret_cast<std::uintptr_t>(found.dli_fbase);
  char command[4400];
  std::snprintf(command, sizeof command, "addr2line -Cfipse '%s' %#lx 2>/dev/null", found.dli_fname,
                static_cast<unsigned long>(at));
  std::string line;
  if (std::FILE* const pipe = ::popen(command, "r")) {
    char part[512];
    while (std::fgets(part, sizeof part, pipe) != nullptr)
      if (line.empty()) line = part;
    ::pclose(pipe);
  }
  while (!line.empty() && line.back() == '\n')
    line.pop_back();
  return line.empty() || line[0] == '?' ? text : line;
}

}  // namespace kvstrata::testing
