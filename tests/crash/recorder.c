/* Records what a process does to the files below $RECORD_ROOT, in the file $RECORD_LOG.
 *
 * Loaded with LD_PRELOAD. A record is seven u64: operation, open file, flags, offset, length, number of
 * the sync, length of what follows; then the bytes that were written, or a path. A write is recorded when
 * it has returned, a sync when it begins and when it has returned: so what a sync covers is known whatever
 * threads do. tests/crash/power.py reads it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE, TRUNCATE, ALLOCATE, SYNC_BEGIN, SYNC_END, MAKE_DIR, UNLINK, REMOVE_DIR, RENAME };
#define DESCRIPTORS 4096
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static const char *root;
static size_t root_length;
static uint64_t numbers[DESCRIPTORS]; /* 0: not below the root */
static uint64_t flags_of[DESCRIPTORS];
static uint64_t last_number, last_sync;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RECORD_LOG");
    root = getenv("RECORD_ROOT");
    if (!path || !root) return;
    root_length = strlen(root);
    log_fd = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_fd < 0) abort();
}

static int ours(const char *path) { return log_fd >= 0 && !strncmp(path, root, root_length); }
static int known(int fd) { return fd >= 0 && fd < DESCRIPTORS && numbers[fd]; }

static void put(const void *data, size_t length) {
    const char *rest = data;
    while (length) {
        ssize_t done = REAL(write)(log_fd, rest, length);
        if (done < 0) {
            if (errno == EINTR) continue;
            abort();
        }
        rest += done;
        length -= done;
    }
}

static void note(uint64_t op, uint64_t file, uint64_t flags, uint64_t offset, uint64_t length, uint64_t sync,
                 const struct iovec *data, int count) {
    int kept = errno;
    uint64_t left = count ? length : 0;
    uint64_t record[7] = {op, file, flags, offset, length, sync, left};
    pthread_mutex_lock(&lock);
    put(record, sizeof record);
    for (int i = 0; i < count && left; i++) {
        size_t part = data[i].iov_len < left ? data[i].iov_len : left;
        put(data[i].iov_base, part);
        left -= part;
    }
    pthread_mutex_unlock(&lock);
    errno = kept;
}

static void note_path(uint64_t op, uint64_t file, uint64_t flags, const char *path) {
    struct iovec data = {(void *)path, strlen(path)};
    note(op, file, flags, 0, data.iov_len, 0, &data, 1);
}

/* --- names */

static int opened(const char *path, int flags, int made, int fd) {
    if (fd < 0 || fd >= DESCRIPTORS) return fd;
    numbers[fd] = 0;
    if (!ours(path)) return fd;
    numbers[fd] = __atomic_add_fetch(&last_number, 1, __ATOMIC_SEQ_CST);
    flags_of[fd] = flags;
    note_path(OPEN, numbers[fd], (uint64_t)flags | (uint64_t)made << 32, path);
    return fd;
}

static int absent(const char *path, int flags) {
    return (flags & O_CREAT) && ours(path) && REAL(access)(path, F_OK) != 0;
}

#define OPENER(name)                                                     \
    int name(const char *path, int flags, ...) {                        \
        va_list rest;                                                   \
        va_start(rest, flags);                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                   \
        int made = absent(path, flags);                                 \
        return opened(path, flags, made, REAL(name)(path, flags, mode)); \
    }
OPENER(open)
OPENER(open64)

#define OPENER_AT(name)                                                  \
    int name(int directory, const char *path, int flags, ...) {         \
        va_list rest;                                                   \
        va_start(rest, flags);                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                   \
        int made = absent(path, flags);                                 \
        return opened(path, flags, made, REAL(name)(directory, path, flags, mode)); \
    }
OPENER_AT(openat)
OPENER_AT(openat64)

int close(int fd) {
    if (fd >= 0 && fd < DESCRIPTORS) numbers[fd] = 0;
    return REAL(close)(fd);
}

#define NAMED(name, op)                                       \
    int name(const char *path) {                              \
        int result = REAL(name)(path);                        \
        if (!result && ours(path)) note_path(op, 0, 0, path); \
        return result;                                        \
    }
NAMED(unlink, UNLINK)
NAMED(rmdir, REMOVE_DIR)

int unlinkat(int directory, const char *path, int flags) {
    char full[8192];
    int below = 0;
    if (path[0] != '/' && known(directory)) { /* shutil.rmtree: the directory's name is asked of the kernel */
        char link[64];
        ssize_t length;
        strcpy(link, "/proc/self/fd/");
        char digits[16], *end = digits + sizeof digits - 1;
        *end = 0;
        for (int rest = directory; rest || !*end; rest /= 10) *--end = '0' + rest % 10;
        strcat(link, end);
        length = REAL(readlink)(link, full, 4096);
        if (length > 0 && strlen(path) < 4000) {
            full[length] = '/';
            strcpy(full + length + 1, path);
            below = 1;
        }
    }
    int result = REAL(unlinkat)(directory, path, flags);
    const char *name = below ? full : path;
    if (!result && ours(name)) note_path(flags & AT_REMOVEDIR ? REMOVE_DIR : UNLINK, 0, 0, name);
    return result;
}

int mkdir(const char *path, mode_t mode) {
    int result = REAL(mkdir)(path, mode);
    if (!result && ours(path)) note_path(MAKE_DIR, 0, 0, path);
    return result;
}

int rename(const char *from, const char *to) {
    if (ours(from) || ours(to)) abort(); /* not modelled: nobody renames */
    return REAL(rename)(from, to);
}

/* --- bytes */

static void wrote(int fd, const struct iovec *data, int count, off_t offset, ssize_t done) {
    if (done > 0 && known(fd)) note(WRITE, numbers[fd], flags_of[fd], offset, done, 0, data, count);
}

static off_t place(int fd) { return known(fd) ? REAL(lseek)(fd, 0, SEEK_CUR) : 0; }

ssize_t write(int fd, const void *data, size_t length) {
    off_t offset = place(fd);
    ssize_t done = REAL(write)(fd, data, length);
    struct iovec one = {(void *)data, length};
    wrote(fd, &one, 1, offset, done);
    return done;
}

ssize_t writev(int fd, const struct iovec *data, int count) {
    off_t offset = place(fd);
    ssize_t done = REAL(writev)(fd, data, count);
    wrote(fd, data, count, offset, done);
    return done;
}

#define WRITER(name, type)                                                  \
    ssize_t name(int fd, const void *data, size_t length, type offset) {    \
        ssize_t done = REAL(name)(fd, data, length, offset);                \
        struct iovec one = {(void *)data, length};                          \
        wrote(fd, &one, 1, offset, done);                                   \
        return done;                                                        \
    }
WRITER(pwrite, off_t)
WRITER(pwrite64, off64_t)

#define VECTOR_WRITER(name, type)                                                  \
    ssize_t name(int fd, const struct iovec *data, int count, type offset) {       \
        ssize_t done = REAL(name)(fd, data, count, offset);                        \
        wrote(fd, data, count, offset, done);                                      \
        return done;                                                               \
    }
VECTOR_WRITER(pwritev, off_t)
VECTOR_WRITER(pwritev64, off64_t)

#define VECTOR_WRITER2(name, type)                                                      \
    ssize_t name(int fd, const struct iovec *data, int count, type offset, int flags) { \
        ssize_t done = REAL(name)(fd, data, count, offset, flags);                      \
        wrote(fd, data, count, offset, done);                                           \
        return done;                                                                    \
    }
VECTOR_WRITER2(pwritev2, off_t)
VECTOR_WRITER2(pwritev64v2, off64_t)

#define TRUNCATER(name, type)                                                                 \
    int name(int fd, type length) {                                                           \
        int result = REAL(name)(fd, length);                                                  \
        if (!result && known(fd)) note(TRUNCATE, numbers[fd], 0, length, 0, 0, NULL, 0);      \
        return result;                                                                        \
    }
TRUNCATER(ftruncate, off_t)
TRUNCATER(ftruncate64, off64_t)

#define ALLOCATER(name, type)                                                                       \
    int name(int fd, int mode, type offset, type length) {                                          \
        int result = REAL(name)(fd, mode, offset, length);                                          \
        if (!result && known(fd)) note(ALLOCATE, numbers[fd], mode, offset, length, 0, NULL, 0);    \
        return result;                                                                              \
    }
ALLOCATER(fallocate, off_t)
ALLOCATER(fallocate64, off64_t)

#define SYNCER(name)                                                                         \
    int name(int fd) {                                                                       \
        if (!known(fd)) return REAL(name)(fd);                                               \
        uint64_t file = numbers[fd];                                                         \
        uint64_t sync = __atomic_add_fetch(&last_sync, 1, __ATOMIC_SEQ_CST);                 \
        note(SYNC_BEGIN, file, 0, 0, 0, sync, NULL, 0);                                      \
        int result = REAL(name)(fd);                                                         \
        if (!result) note(SYNC_END, file, 0, 0, 0, sync, NULL, 0);                           \
        return result;                                                                       \
    }
SYNCER(fsync)
SYNCER(fdatasync)

int msync(void *address, size_t length, int flags) {
    abort(); /* not modelled: nobody writes through a mapping */
    return -1;
}
