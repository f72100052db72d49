// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "files/files.h"

namespace kvstrata {

namespace {

constexpr std::size_t kMaxParts = 8;
constexpr std::size_t kBounceBytes = 1 << 20;

Status os_error(const char* message) noexcept {
  return Status(StatusCode::kOsError, message, errno);
}

// Repeats a call while a signal interrupts it.
template <typename Call>
int uninterrupted(Call&& call) noexcept {
  int result;
  do {
    result = call();
  } while (result == -1 && errno == EINTR);
  return result;
}

// Owns one descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const noexcept { return fd_; }

 private:
  int fd_;
};

bool is_aligned(const void* bytes, std::size_t length) noexcept {
  return reinterpret_cast<std::uintptr_t>(bytes) % kFileBlockBytes == 0 &&
         length % kFileBlockBytes == 0;
}

// Removes the first `done` bytes from `vectors`, the parts that are still to be transferred.
void skip(std::span<iovec>& vectors, std::size_t done) noexcept {
  while (!vectors.empty() && done >= vectors[0].iov_len) {
    done -= vectors[0].iov_len;
    vectors = vectors.subspan(1);
  }
  if (done > 0) {
    vectors[0].iov_base = static_cast<char*>(vectors[0].iov_base) + done;
    vectors[0].iov_len -= done;
  }
}

FileStat to_file_stat(const struct stat& found) noexcept {
  return {.is_file = S_ISREG(found.st_mode),
          .is_folder = S_ISDIR(found.st_mode),
          .length = static_cast<std::uint64_t>(found.st_size),
          .device = found.st_dev,
          .inode = found.st_ino,
          .modified_unix_ns =
              std::int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec,
          .accessed_unix_ns =
              std::int64_t{found.st_atim.tv_sec} * 1'000'000'000 + found.st_atim.tv_nsec};
}

class PosixFile final : public File {
 public:
  PosixFile(int fd, bool direct) noexcept : fd_(fd), direct_(direct) {}

  Status read(std::span<const ReadPart> parts, std::uint64_t offset) noexcept override {
    return transfer<true>(parts, offset);
  }

  Status write(std::span<const WritePart> parts, std::uint64_t offset) noexcept override {
    return transfer<false>(parts, offset);
  }

  Status sync() noexcept override {
    return uninterrupted([&] { return ::fdatasync(fd_.get()); }) == 0 ? Status()
                                                                      : os_error("fdatasync");
  }

  std::uint64_t next_data(std::uint64_t offset) noexcept override {
    const off_t found = ::lseek(fd_.get(), static_cast<off_t>(offset), SEEK_DATA);
    if (found >= 0) return static_cast<std::uint64_t>(found);
    return errno == ENXIO ? ~std::uint64_t{0} : offset;
  }

  Status allocate(std::uint64_t length) noexcept override {
    const auto size = static_cast<off_t>(length);
    if (uninterrupted([&] { return ::fallocate(fd_.get(), 0, 0, size); }) == 0) return Status();
    if (errno != EOPNOTSUPP) return os_error("fallocate");
    std::uint64_t there = 0;
    KVSTRATA_RETURN_IF_ERROR(this->length(&there));
    return there >= length ? Status() : truncate(length);
  }

  Status truncate(std::uint64_t length) noexcept override {
    return uninterrupted([&] { return ::ftruncate(fd_.get(), static_cast<off_t>(length)); }) == 0
               ? Status()
               : os_error("ftruncate");
  }

  Status stat(FileStat* out) noexcept override {
    struct stat found{};
    if (::fstat(fd_.get(), &found) != 0) return os_error("fstat");
    *out = to_file_stat(found);
    return Status();
  }

  Status set_access_time(std::int64_t unix_ns) noexcept override {
    std::array<timespec, 2> times{};
    times[0] = {.tv_sec = unix_ns / 1'000'000'000, .tv_nsec = unix_ns % 1'000'000'000};
    times[1].tv_nsec = UTIME_OMIT;
    return ::futimens(fd_.get(), times.data()) == 0 ? Status() : os_error("futimens");
  }

  bool direct() const noexcept override { return direct_; }

 private:
  template <bool kReads, typename Part>
  Status transfer(std::span<const Part> parts, std::uint64_t offset) noexcept {
    if (parts.size() > kMaxParts)
      return Status(StatusCode::kBadArgument, "parts: too many", parts.size(), kMaxParts);
    std::uint64_t length = 0;
    bool aligned = true;
    for (const Part& part : parts) {
      length += part.length;
      aligned = aligned && is_aligned(part.bytes, part.length);
    }
    if (direct_ && (offset % kFileBlockBytes != 0 || length % kFileBlockBytes != 0))
      return Status(StatusCode::kBadArgument, "direct: not whole blocks", offset, length);
    if (direct_ && !aligned) return bounced<kReads>(parts, offset);
    std::array<iovec, kMaxParts> vectors;
    for (std::size_t i = 0; i < parts.size(); ++i)
      vectors[i] = {.iov_base = const_cast<void*>(static_cast<const void*>(parts[i].bytes)),
                    .iov_len = parts[i].length};
    return move_all<kReads>(std::span(vectors).first(parts.size()), offset);
  }

  template <bool kReads>
  Status move_all(std::span<iovec> left, std::uint64_t offset) noexcept {
    skip(left, 0);
    while (!left.empty()) {
      const int count = static_cast<int>(left.size());
      const auto at = static_cast<off_t>(offset);
      const ssize_t done = kReads ? ::preadv(fd_.get(), left.data(), count, at)
                                  : ::pwritev(fd_.get(), left.data(), count, at);
      if (done < 0) {
        if (errno == EINTR) continue;
        return os_error(kReads ? "preadv" : "pwritev");
      }
      if (done == 0) {
        if constexpr (kReads)
          return Status(StatusCode::kOutOfRange, "the file ends before the requested bytes",
                        offset);
        return Status(StatusCode::kNoSpace, Reason::kDiskFull, "the file system takes no bytes");
      }
      offset += static_cast<std::uint64_t>(done);
      skip(left, static_cast<std::size_t>(done));
    }
    return Status();
  }

  // Transfers parts that are not aligned to blocks through aligned memory, a megabyte at a time.
  template <bool kReads, typename Part>
  Status bounced(std::span<const Part> parts, std::uint64_t offset) noexcept {
    const std::unique_ptr<void, void (*)(void*)> bounce(
        std::aligned_alloc(kFileBlockBytes, kBounceBytes), std::free);
    if (bounce == nullptr) return Status(StatusCode::kNoSpace, "memory for unaligned parts");
    auto* const buffer = static_cast<char*>(bounce.get());
    std::size_t part = 0;
    std::size_t at = 0;  // in parts[part]
    while (part < parts.size()) {
      // The next buffer begins at byte `at` of parts[part].
      std::size_t filled = 0;
      std::size_t end_part = part;
      std::size_t end_at = at;
      while (end_part < parts.size() && filled < kBounceBytes) {
        const std::size_t take = std::min(parts[end_part].length - end_at, kBounceBytes - filled);
        if constexpr (!kReads)
          std::memcpy(buffer + filled, static_cast<const char*>(parts[end_part].bytes) + end_at,
                      take);
        filled += take;
        end_at += take;
        if (end_at == parts[end_part].length) {
          ++end_part;
          end_at = 0;
        }
      }
      if (filled == 0) break;
      iovec vector{.iov_base = buffer, .iov_len = filled};
      KVSTRATA_RETURN_IF_ERROR(move_all<kReads>(std::span(&vector, 1), offset));
      if constexpr (kReads) {
        std::size_t from = 0;
        for (std::size_t i = part; from < filled; ++i) {
          const std::size_t begin = i == part ? at : 0;
          const std::size_t take = std::min(parts[i].length - begin, filled - from);
          std::memcpy(static_cast<char*>(parts[i].bytes) + begin, buffer + from, take);
          from += take;
        }
      }
      offset += filled;
      part = end_part;
      at = end_at;
    }
    return Status();
  }

  Descriptor fd_;
  bool direct_;
};

class PosixLock final : public FileLock {
 public:
  PosixLock(Descriptor file, Descriptor folder) noexcept
      : fd_(std::move(file)), folder_(std::move(folder)) {}

  void note(const std::string& text) noexcept override {
    if (::ftruncate(fd_.get(), 0) != 0) return;
    [[maybe_unused]] const ssize_t written = ::pwrite(fd_.get(), text.data(), text.size(), 0);
  }

 private:
  Descriptor fd_;
  Descriptor folder_;
};

// Whether `error` of an open() means that the name belongs to something other than a regular file:
// a link, a socket or a device without a driver, a folder.
bool means_other_kind(int error) noexcept {
  return error == ELOOP || error == ENXIO || error == EISDIR;
}

Status not_a_file() noexcept {
  return Status(StatusCode::kCorrupt, "not a regular file");
}

// If the name belongs to something other than a regular file, opening it must not block the thread
// (as a pipe without a writer would), and must not give this process a terminal.
constexpr int kOpenFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;

// Whether an open descriptor belongs to a regular file.
bool is_regular(int fd) noexcept {
  struct stat found{};
  return ::fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

class PosixFiles final : public FileLayer {
 public:
  Status open(const std::string& path, FileMode mode, bool direct,
              std::unique_ptr<File>* out) noexcept override {
    int flags = kOpenFlags;
    flags |= mode == FileMode::kRead ? O_RDONLY : O_RDWR;
    if (mode == FileMode::kCreate) flags |= O_CREAT | O_EXCL;
    const int how = flags | (direct ? O_DIRECT : 0);
    const int fd = uninterrupted([&] { return ::open(path.c_str(), how, 0600); });
    if (fd < 0) {
      if (mode != FileMode::kCreate && means_other_kind(errno)) return not_a_file();
      if (!direct || errno != EINVAL) return os_error("open");
      struct stat found{};
      if (mode != FileMode::kCreate && ::lstat(path.c_str(), &found) == 0 &&
          !S_ISREG(found.st_mode))
        return not_a_file();  // a folder is never direct
      // Some kernels create the file before they refuse O_DIRECT.
      if (mode == FileMode::kCreate) ::unlink(path.c_str());
      return Status(StatusCode::kUnsupported, "this file system has no direct files");
    }
    if (!is_regular(fd)) {
      ::close(fd);
      return not_a_file();
    }
    *out = std::make_unique<PosixFile>(fd, direct);
    return Status();
  }

  Status rename(const std::string& from, const std::string& to) noexcept override {
    return ::rename(from.c_str(), to.c_str()) == 0 ? Status() : os_error("rename");
  }

  Status unlink(const std::string& path) noexcept override {
    return ::unlink(path.c_str()) == 0 ? Status() : os_error("unlink");
  }

  Status make_folder(const std::string& path) noexcept override {
    return ::mkdir(path.c_str(), 0700) == 0 ? Status() : os_error("mkdir");
  }

  Status sync_folder(const std::string& path) noexcept override {
    constexpr int kHow = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    const Descriptor folder(uninterrupted([&] { return ::open(path.c_str(), kHow); }));
    if (folder.get() < 0) return os_error("open");
    return uninterrupted([&] { return ::fsync(folder.get()); }) == 0 ? Status() : os_error("fsync");
  }

  Status stat(const std::string& path, FileStat* out) noexcept override {
    struct stat found{};
    if (::lstat(path.c_str(), &found) != 0) return os_error("lstat");
    *out = to_file_stat(found);
    return Status();
  }

  Status list(const std::string& path, std::vector<FolderEntry>* out) noexcept override {
    out->clear();
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(path.c_str()), ::closedir);
    if (folder == nullptr) return os_error("opendir");
    for (;;) {
      errno = 0;
      const dirent* const entry = ::readdir(folder.get());
      if (entry == nullptr) return errno == 0 ? Status() : os_error("readdir");
      std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      FolderEntry found{.name = std::move(name)};
      if (entry->d_type == DT_UNKNOWN) {
        FileStat stat_of;
        if (!stat(path + "/" + found.name, &stat_of).ok()) continue;  // removed meanwhile
        found.is_file = stat_of.is_file;
        found.is_folder = stat_of.is_folder;
      } else {
        found.is_file = entry->d_type == DT_REG;
        found.is_folder = entry->d_type == DT_DIR;
      }
      out->push_back(std::move(found));
    }
  }

  Status space(const std::string& path, FileSpace* out) noexcept override {
    struct statvfs found{};
    if (::statvfs(path.c_str(), &found) != 0) return os_error("statvfs");
    out->total_bytes = std::uint64_t{found.f_blocks} * found.f_frsize;
    out->free_bytes = std::uint64_t{found.f_bavail} * found.f_frsize;
    return Status();
  }

  Status lock(const std::string& path, std::unique_ptr<FileLock>* out,
              std::string* holder) noexcept override {
    const std::string folder = path.substr(0, path.rfind('/'));
    constexpr int kHow = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    Descriptor locked(uninterrupted([&] { return ::open(folder.c_str(), kHow); }));
    if (locked.get() < 0) return os_error("open");
    const bool busy = ::flock(locked.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    // The file has the name of the holder.
    constexpr int kHowFile = O_RDWR | O_CREAT | kOpenFlags;
    Descriptor file(uninterrupted([&] { return ::open(path.c_str(), kHowFile, 0600); }));
    if (file.get() < 0) return means_other_kind(errno) ? not_a_file() : os_error("open");
    if (!is_regular(file.get())) return not_a_file();
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return os_error("flock");
      std::array<char, 200> text{};
      const ssize_t length = ::pread(file.get(), text.data(), text.size(), 0);
      holder->assign(text.data(), static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
      return Status(StatusCode::kBusy, "locked");
    }
    if (busy) return Status(StatusCode::kBusy, "its folder is locked");
    *out = std::make_unique<PosixLock>(std::move(file), std::move(locked));
    return Status();
  }
};

}  // namespace

FileLayer& posix_files() noexcept {
  static PosixFiles files;
  return files;
}

}  // namespace kvstrata
