/* A journal of a process's file operations in order, with injected failures.
 *
 * Loaded with LD_PRELOAD. It does nothing until torture_begin names a folder. From then on every
 * creation, write, truncation, rename and sync below that folder is a record of the journal, in the
 * kernel's order: one lock is held during each call and its record. lock.mdb and owner.lock are left
 * out: they have no meaning after a crash.
 *
 * A record is a head (kind, bytes of data, inode, offset; little-endian) and its data.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPENED = 1, WRITTEN, WRITTEN_SYNC, RESIZED, SYNCED, SYNC_FAILED, RENAMED, MARKED, MADE_FOLDER };
enum operation { WRITE, SYNC, READ, OPERATIONS };

struct head {
  uint32_t kind, size;
  uint64_t inode, offset;
};

struct fault {
  long skip, count; /* calls that still succeed, then calls that fail */
  int error;        /* negative: the process is killed instead */
};

enum { DESCRIPTORS = 1024 };
static struct {
  uint64_t inode; /* 0: not below the folder */
  int is_sync, is_data;
} open_files[DESCRIPTORS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static int journal = -1;
static struct fault faults[OPERATIONS];

#define NEXT(name) \
  static __typeof__(&name) next_##name; \
  if (!next_##name) next_##name = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void put(const void *data, size_t size) {
  NEXT(write);
  for (const char *at = data; size > 0;) {
    ssize_t done = next_write(journal, at, size);
    if (done < 0) abort(); /* a journal with a gap would cause false findings */
    at += done;
    size -= (size_t)done;
  }
}

static void note(enum kind kind, uint64_t inode, uint64_t offset, const void *data, size_t size) {
  if (journal < 0) return;
  struct head head = {kind, (uint32_t)size, inode, offset};
  put(&head, sizeof head);
  put(data, size);
}

/* The path of `path` from the folder on, empty for the folder itself, NULL outside of it. */
static const char *below(const char *path) {
  size_t size = strlen(root);
  if (!size || strncmp(path, root, size)) return NULL;
  if (!path[size]) return path + size;
  if (path[size] != '/') return NULL;
  const char *name = strrchr(path, '/') + 1;
  return strcmp(name, "lock.mdb") && strcmp(name, "owner.lock") ? path + size + 1 : NULL;
}

static int is_ours(int fd) { return fd >= 0 && fd < DESCRIPTORS && open_files[fd].inode; }

/* Whether this call is to fail. */
static int fails(enum operation operation, int fd) {
  struct fault *fault = &faults[operation];
  if (!is_ours(fd) || !open_files[fd].is_data || fault->count <= 0) return 0;
  if (fault->skip-- > 0) return 0;
  fault->count--;
  if (fault->error < 0) kill(getpid(), SIGKILL);
  errno = fault->error;
  return 1;
}

/* ---- for the tests ------------------------------------------------------------------------- */

/* Journal what happens below `folder`; `to` may be empty, for faults alone. */
void torture_begin(const char *folder, const char *to) {
  root[0] = 0;
  int file = *to ? open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
  pthread_mutex_lock(&lock);
  snprintf(root, sizeof root, "%s", folder);
  journal = file;
  memset(open_files, 0, sizeof open_files);
  memset(faults, 0, sizeof faults);
  pthread_mutex_unlock(&lock);
}

void torture_mark(const char *data, size_t size) {
  pthread_mutex_lock(&lock);
  note(MARKED, 0, 0, data, size);
  pthread_mutex_unlock(&lock);
}

void torture_fault(int operation, long skip, long count, int error) {
  pthread_mutex_lock(&lock);
  faults[operation] = (struct fault){skip, count, error};
  pthread_mutex_unlock(&lock);
}

/* Failures of `operation` that are still to come. */
long torture_pending(int operation) { return faults[operation].count; }

/* ---- what is watched ----------------------------------------------------------------------- */

static void opened(const char *path, int flags, int was_there, int fd) {
  const char *name = below(path);
  if (fd < 0 || fd >= DESCRIPTORS) return;
  memset(&open_files[fd], 0, sizeof open_files[fd]);
  struct stat facts;
  if (!name || fstat(fd, &facts)) return;
  open_files[fd].inode = facts.st_ino;
  open_files[fd].is_sync = (flags & O_DSYNC) != 0;
  open_files[fd].is_data = strcmp(strrchr(path, '/') + 1, "data.mdb") == 0;
  note(OPENED, facts.st_ino, !was_there, name, strlen(name));
  if (flags & O_TRUNC) note(RESIZED, facts.st_ino, 0, NULL, 0);
}

#define OPEN(name)                                             \
  int name(const char *path, int flags, ...) {                 \
    NEXT(name);                                                \
    va_list rest;                                              \
    va_start(rest, flags);                                     \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;  \
    va_end(rest);                                              \
    pthread_mutex_lock(&lock);                                 \
    int was_there = !access(path, F_OK);                       \
    int fd = next_##name(path, flags, mode);                   \
    opened(path, flags, was_there, fd);                        \
    pthread_mutex_unlock(&lock);                               \
    return fd;                                                 \
  }
OPEN(open)
OPEN(open64)

int mkdir(const char *path, mode_t mode) {
  NEXT(mkdir);
  pthread_mutex_lock(&lock);
  int result = next_mkdir(path, mode);
  struct stat facts;
  if (!result && below(path) && !stat(path, &facts))
    note(MADE_FOLDER, facts.st_ino, 0, below(path), strlen(below(path)));
  pthread_mutex_unlock(&lock);
  return result;
}

int rename(const char *from, const char *to) {
  NEXT(rename);
  pthread_mutex_lock(&lock);
  int result = next_rename(from, to);
  if (!result && below(from) && below(to)) {
    char both[2 * PATH_MAX];
    int size = snprintf(both, sizeof both, "%s%c%s", below(from), 0, below(to));
    note(RENAMED, 0, 0, both, (size_t)size);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static void written(int fd, off_t offset, const struct iovec *parts, int count, ssize_t done) {
  if (!is_ours(fd) || done <= 0 || journal < 0) return;
  enum kind kind = open_files[fd].is_sync ? WRITTEN_SYNC : WRITTEN;
  struct head head = {kind, (uint32_t)done, open_files[fd].inode, (uint64_t)offset};
  put(&head, sizeof head);
  for (int i = 0; i < count && done > 0; i++) {
    size_t size = parts[i].iov_len < (size_t)done ? parts[i].iov_len : (size_t)done;
    put(parts[i].iov_base, size);
    done -= (ssize_t)size;
  }
}

/* Untracked descriptors take no lock: logging may write from anywhere. */
#define WATCH_WRITE(fd, offset, parts, count, call)          \
  if (!is_ours(fd)) return call;                             \
  pthread_mutex_lock(&lock);                                 \
  off_t at = (offset);                                       \
  ssize_t done = fails(WRITE, fd) ? -1 : call;               \
  written(fd, at, parts, count, done);                       \
  pthread_mutex_unlock(&lock);                               \
  return done

ssize_t write(int fd, const void *data, size_t size) {
  NEXT(write);
  struct iovec part = {(void *)data, size};
  WATCH_WRITE(fd, lseek(fd, 0, SEEK_CUR), &part, 1, next_write(fd, data, size));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  NEXT(pwrite);
  struct iovec part = {(void *)data, size};
  WATCH_WRITE(fd, offset, &part, 1, next_pwrite(fd, data, size, offset));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  NEXT(pwrite64);
  struct iovec part = {(void *)data, size};
  WATCH_WRITE(fd, offset, &part, 1, next_pwrite64(fd, data, size, offset));
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  NEXT(writev);
  WATCH_WRITE(fd, lseek(fd, 0, SEEK_CUR), parts, count, next_writev(fd, parts, count));
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  NEXT(pwritev);
  WATCH_WRITE(fd, offset, parts, count, next_pwritev(fd, parts, count, offset));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
  NEXT(pwritev64);
  WATCH_WRITE(fd, offset, parts, count, next_pwritev64(fd, parts, count, offset));
}

#define WATCH_RESIZE(fd, call)                                     \
  if (!is_ours(fd)) return call;                                                    \
  pthread_mutex_lock(&lock);                                                        \
  struct stat facts;                                                                \
  int result = call;                                                                \
  if (!result && !fstat(fd, &facts))                                                \
    note(RESIZED, open_files[fd].inode, (uint64_t)facts.st_size, NULL, 0);          \
  pthread_mutex_unlock(&lock);                                                      \
  return result

int ftruncate(int fd, off_t size) {
  NEXT(ftruncate);
  WATCH_RESIZE(fd, next_ftruncate(fd, size));
}
int ftruncate64(int fd, off64_t size) {
  NEXT(ftruncate64);
  WATCH_RESIZE(fd, next_ftruncate64(fd, size));
}
int posix_fallocate(int fd, off_t offset, off_t size) {
  NEXT(posix_fallocate);
  WATCH_RESIZE(fd, next_posix_fallocate(fd, offset, size));
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  NEXT(posix_fallocate64);
  WATCH_RESIZE(fd, next_posix_fallocate64(fd, offset, size));
}

#define WATCH_SYNC(fd, call)                                                          \
  if (!is_ours(fd)) return call;                                                      \
  pthread_mutex_lock(&lock);                                                          \
  int result = fails(SYNC, fd) ? -1 : call;                                           \
  note(result ? SYNC_FAILED : SYNCED, open_files[fd].inode, 0, NULL, 0);              \
  pthread_mutex_unlock(&lock);                                                        \
  return result

int fdatasync(int fd) {
  NEXT(fdatasync);
  WATCH_SYNC(fd, next_fdatasync(fd));
}
int fsync(int fd) {
  NEXT(fsync);
  WATCH_SYNC(fd, next_fsync(fd));
}

/* Only read: nothing to write down. */
#define WATCH_READ(fd, call)               \
  pthread_mutex_lock(&lock);               \
  int is_bad = fails(READ, fd);            \
  pthread_mutex_unlock(&lock);             \
  if (is_bad) return -1;                   \
  return call

ssize_t pread(int fd, void *data, size_t size, off_t offset) {
  NEXT(pread);
  WATCH_READ(fd, next_pread(fd, data, size, offset));
}
ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
  NEXT(pread64);
  WATCH_READ(fd, next_pread64(fd, data, size, offset));
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
  NEXT(preadv);
  WATCH_READ(fd, next_preadv(fd, parts, count, offset));
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
  NEXT(preadv64);
  WATCH_READ(fd, next_preadv64(fd, parts, count, offset));
}
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
  NEXT(preadv2);
  WATCH_READ(fd, next_preadv2(fd, parts, count, offset, flags));
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
  NEXT(preadv64v2);
  WATCH_READ(fd, next_preadv64v2(fd, parts, count, offset, flags));
}

int close(int fd) {
  NEXT(close);
  if (is_ours(fd)) open_files[fd].inode = 0;
  return next_close(fd);
}
