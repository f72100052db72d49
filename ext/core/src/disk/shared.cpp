// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/shared.h"

namespace kvstrata::disk {

Status FileOpener::open(const std::string& path, FileMode mode,
                        std::unique_ptr<File>* out) noexcept {
  if (direct_) {
    const Status status = files_.open(path, mode, true, out);
    if (status.code() != StatusCode::kUnsupported) return status;
    direct_ = false;
  }
  return files_.open(path, mode, false, out);
}

}  // namespace kvstrata::disk
