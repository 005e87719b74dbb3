/* The loops over slices and blocks: reading, proving, copying and sending, without the interpreter.

   Everything here works on arrays that Python planned (storage_server.planning.plan) and decides nothing. Signatures and
   meaning are in native.pyi. The interpreter lock is released except for short checksums. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BLOCK_BYTES 16384
#define LANES 4                       /* crc32 takes 3 cycles and a new one may start each cycle */
#define READ_BYTES (16 * BLOCK_BYTES) /* read, then proved while still in the second-level cache */
#define AHEAD_BYTES (4 * 65536)        /* four layers of a small model's chunk at a time keep a disk busier than one */
#define AHEAD_BYTES_MAX (2 << 20)      /* of one chunk at a time */
#define QUEUE_DEPTH 256               /* reads that one thread has under way at the disk */
#define DIRECT_BYTES_MAX (1 << 20)    /* of one such read */
#define DIRECT_ALIGNMENT 4096         /* of its place in the file and of its length */
#define DIRECT_FILES 1024             /* files that one gather reads from past the page cache */
#define SEND_SPANS 512 /* half of what the kernel takes at once; the fewer calls, the fewer copies it interrupts */
#define SEND_BYTES (8 << 20)
#define SHORT_BYTES (1 << 20) /* giving the interpreter up costs up to a switch interval to get it back */

/* CRC-32C, Castagnoli, reflected, polynomial 0x1EDC6F41 (RFC 3720, appendix B.4) */

static uint32_t software_table[8][256];

static void make_software_table(void)
{
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
        software_table[0][value] = crc;
    }
    for (int row = 1; row < 8; row++)
        for (int value = 0; value < 256; value++) {
            uint32_t before = software_table[row - 1][value];
            software_table[row][value] = before >> 8 ^ software_table[0][before & 255];
        }
}

static uint32_t crc_software(uint32_t crc, const uint8_t *data, size_t nbytes)
{
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        uint32_t low = crc ^ (data[0] | data[1] << 8 | data[2] << 16 | (uint32_t)data[3] << 24);
        crc = software_table[7][low & 255] ^ software_table[6][low >> 8 & 255] ^ software_table[5][low >> 16 & 255] ^
              software_table[4][low >> 24] ^ software_table[3][data[4]] ^ software_table[2][data[5]] ^
              software_table[1][data[6]] ^ software_table[0][data[7]];
    }
    for (; nbytes; data++, nbytes--)
        crc = crc >> 8 ^ software_table[0][(crc ^ *data) & 255];
    return crc;
}

static void crc_lanes_software(uint32_t crcs[LANES], const uint8_t *data)
{
    for (int lane = 0; lane < LANES; lane++)
        crcs[lane] = crc_software(~0u, data + lane * BLOCK_BYTES, BLOCK_BYTES);
}

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__) /* gcc counts CRC32 to SSE4.2 */
#define HARDWARE __attribute__((target("sse4.2,crc32")))
#else
#define HARDWARE __attribute__((target("sse4.2")))
#endif
#define CRC_WORD(crc, word) _mm_crc32_u64(crc, word)
#define CRC_BYTE(crc, byte) _mm_crc32_u8(crc, byte)
static int has_hardware_crc(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define HARDWARE __attribute__((target("+crc")))
#define CRC_WORD(crc, word) __crc32cd((uint32_t)(crc), word)
#define CRC_BYTE(crc, byte) __crc32cb(crc, byte)
static int has_hardware_crc(void)
{
    return (getauxval(AT_HWCAP) & 1 << 7) != 0; /* HWCAP_CRC32 */
}
#endif

#ifdef HARDWARE
HARDWARE static uint32_t crc_hardware(uint32_t crc, const uint8_t *data, size_t nbytes)
{
    uint64_t wide = crc, word;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        memcpy(&word, data, 8);
        wide = CRC_WORD(wide, word);
    }
    crc = (uint32_t)wide;
    for (; nbytes; data++, nbytes--)
        crc = CRC_BYTE(crc, *data);
    return crc;
}

HARDWARE static void crc_lanes_hardware(uint32_t crcs[LANES], const uint8_t *data)
{
    uint64_t a = ~0u, b = ~0u, c = ~0u, d = ~0u, word;
    for (size_t at = 0; at < BLOCK_BYTES; at += 8) {
        memcpy(&word, data + at, 8);
        a = CRC_WORD(a, word);
        memcpy(&word, data + at + BLOCK_BYTES, 8);
        b = CRC_WORD(b, word);
        memcpy(&word, data + at + 2 * BLOCK_BYTES, 8);
        c = CRC_WORD(c, word);
        memcpy(&word, data + at + 3 * BLOCK_BYTES, 8);
        d = CRC_WORD(d, word);
    }
    crcs[0] = (uint32_t)a, crcs[1] = (uint32_t)b, crcs[2] = (uint32_t)c, crcs[3] = (uint32_t)d;
}
#endif

static uint32_t (*crc_run)(uint32_t, const uint8_t *, size_t) = crc_software;
static void (*crc_lanes)(uint32_t[LANES], const uint8_t *) = crc_lanes_software;

/* The first block of `data` whose checksum is not in `words`, or -1. */
static int64_t first_bad(const uint8_t *data, size_t nbytes, const uint8_t *words)
{
    int64_t block = 0;
    uint32_t expected[LANES], found[LANES];
    for (; nbytes >= LANES * BLOCK_BYTES; block += LANES, data += LANES * BLOCK_BYTES, nbytes -= LANES * BLOCK_BYTES) {
        memcpy(expected, words + 4 * block, sizeof expected);
        crc_lanes(found, data);
        for (int lane = 0; lane < LANES; lane++)
            if (~found[lane] != expected[lane])
                return block + lane;
    }
    while (nbytes) {
        size_t count = nbytes < BLOCK_BYTES ? nbytes : BLOCK_BYTES;
        memcpy(expected, words + 4 * block, 4);
        if (~crc_run(~0u, data, count) != expected[0])
            return block;
        block++, data += count, nbytes -= count;
    }
    return -1;
}

/* The checksum of each block of `data`. */
static void all_words(const uint8_t *data, size_t nbytes, uint8_t *words)
{
    uint32_t found[LANES];
    for (; nbytes >= LANES * BLOCK_BYTES; data += LANES * BLOCK_BYTES, nbytes -= LANES * BLOCK_BYTES) {
        crc_lanes(found, data);
        for (int lane = 0; lane < LANES; lane++)
            found[lane] = ~found[lane];
        memcpy(words, found, sizeof found);
        words += sizeof found;
    }
    while (nbytes) {
        size_t count = nbytes < BLOCK_BYTES ? nbytes : BLOCK_BYTES;
        found[0] = ~crc_run(~0u, data, count);
        memcpy(words, found, 4);
        words += 4, data += count, nbytes -= count;
    }
}

/* Stores that leave the cache alone: a payload that another process will read much later would only evict others. */
static void copy_past_cache(uint8_t *target, const uint8_t *source, size_t nbytes)
{
#if defined(__x86_64__)
    size_t head = -(uintptr_t)target & 63;
    if (nbytes < 4096 + head) {
        memcpy(target, source, nbytes);
        return;
    }
    memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= 64; target += 64, source += 64, nbytes -= 64) {
        _mm_prefetch((const char *)source + 1024, _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32)), d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)(target + 16), b);
        _mm_stream_si128((__m128i *)(target + 32), c);
        _mm_stream_si128((__m128i *)(target + 48), d);
    }
    _mm_sfence();
#endif
    memcpy(target, source, nbytes);
}

typedef struct {
    int64_t fd, offset, start, nbytes, extent_bytes, first_word, target, landing;
} Row;

typedef enum { GOOD, CORRUPT, SHORT, FAILED, COLD } Outcome;
typedef enum { WAIT, NOWAIT } Patience; /* NOWAIT: what is not in the page cache is COLD */

static Outcome read_all(int fd, uint8_t *target, size_t nbytes, off_t offset, Patience patience)
{
    while (nbytes) {
        struct iovec vector = {target, nbytes};
        ssize_t count = preadv2(fd, &vector, 1, offset, patience == NOWAIT ? RWF_NOWAIT : 0);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0 && patience == NOWAIT)
            return COLD; /* whatever it is, waiting for it tells; some kernels say 0 for what is not there yet */
        if (count <= 0)
            return count < 0 ? FAILED : SHORT;
        target += count, offset += count, nbytes -= count;
    }
    return GOOD;
}

/* Read blocks from `at`, a block's start, to the end of block or extent at `at + nbytes`. The target may be memory that
   others write too, so a block that fails there is read and proved once more in memory of our own: only that tells of
   the store, and a client cannot make sound objects count as damaged. */
static Outcome read_blocks(const Row *row, const uint8_t *words, int64_t *at, size_t nbytes, uint8_t *target,
                           Patience patience)
{
    uint8_t block[BLOCK_BYTES];
    Outcome outcome = read_all((int)row->fd, target, nbytes, row->offset + *at, patience);
    while (outcome == GOOD) {
        const uint8_t *expected = words + 4 * (row->first_word + *at / BLOCK_BYTES);
        int64_t bad = first_bad(target, nbytes, expected);
        if (bad < 0)
            return GOOD;
        size_t skip = bad * BLOCK_BYTES, count = nbytes - skip < BLOCK_BYTES ? nbytes - skip : BLOCK_BYTES;
        *at += skip, target += skip, nbytes -= skip;
        outcome = read_all((int)row->fd, block, count, row->offset + *at, patience);
        if (outcome != GOOD)
            return outcome;
        if (first_bad(block, count, expected + 4 * bad) >= 0)
            return CORRUPT;
        memcpy(target, block, count);
        if (nbytes == count)
            return GOOD;
        *at += count, target += count, nbytes -= count;
    }
    return outcome;
}

/* Whole blocks go straight to their place; of a block cut by the row's ends only the wanted part does. `failed_at` is
   how far into the row the failure lies. */
static Outcome read_row(const Row *row, const uint8_t *words, uint8_t *target, int64_t *failed_at, Patience patience)
{
    uint8_t block[BLOCK_BYTES];
    int64_t at = row->start, end = row->start + row->nbytes;
    while (at < end) {
        int64_t skip = at % BLOCK_BYTES, first = at - skip;
        int64_t block_end = first + BLOCK_BYTES < row->extent_bytes ? first + BLOCK_BYTES : row->extent_bytes;
        Outcome outcome;
        int64_t taken, bad_at;
        if (skip == 0 && block_end <= end) {
            taken = end - at < READ_BYTES ? end - at : READ_BYTES;
            if (at + taken < row->extent_bytes)
                taken -= taken % BLOCK_BYTES;
            bad_at = at;
            outcome = read_blocks(row, words, &bad_at, taken, target, patience);
        } else {
            taken = (block_end < end ? block_end : end) - at;
            bad_at = first;
            outcome = read_blocks(row, words, &bad_at, block_end - first, block, patience);
            if (outcome == GOOD)
                memcpy(target, block + skip, taken);
        }
        if (outcome != GOOD) {
            *failed_at = bad_at > row->start ? bad_at - row->start : 0;
            return outcome;
        }
        at += taken, target += taken;
    }
    return GOOD;
}

/* Start reading what a cold row wants, and what follows it in its extent: the next layers of that chunk come next. Of
   the first layer nothing but itself is read, because nobody can use a layer before it is whole; then as much again as
   lies before the row, in reads that are long enough for a disk. */
static void read_ahead(const Row *row)
{
    int64_t first = row->start - row->start % BLOCK_BYTES; /* a block is read as a whole, because it is proved so */
    int64_t wanted = row->start + row->nbytes - first, nbytes = first < AHEAD_BYTES_MAX ? first : AHEAD_BYTES_MAX;
    if (first && nbytes < AHEAD_BYTES)
        nbytes = AHEAD_BYTES;
    if (nbytes < wanted)
        nbytes = wanted;
    if (nbytes > row->extent_bytes - first)
        nbytes = row->extent_bytes - first;
    posix_fadvise((int)row->fd, row->offset + first, nbytes, POSIX_FADV_WILLNEED);
}

static Outcome carry_out(const Row *row, const uint8_t *words, uint8_t *base, int past_cache, int64_t *failed_at,
                         Patience patience)
{
    if (row->fd >= 0)
        return read_row(row, words, base + row->target, failed_at, patience);
    const uint8_t *source = (const uint8_t *)(uintptr_t)row->offset + row->start;
    if (past_cache)
        copy_past_cache(base + row->target, source, row->nbytes);
    else
        memcpy(base + row->target, source, row->nbytes);
    return GOOD;
}

/* Memory that clients hand in may lose pages at any moment. Where it is guarded (`guard_missing`), touching a page that is
   gone is SIGBUS instead of a new page of ours; in a gather that ends the gather, as EFAULT does in a system call. */
static __thread sigjmp_buf *volatile gathering;
static struct sigaction sigbus_before;

static void on_sigbus(int number, siginfo_t *info, void *context)
{
    if (gathering != NULL)
        siglongjmp(*gathering, 1);
    sigaction(SIGBUS, &sigbus_before, NULL); /* not ours: it comes again, to whoever was there before */
}

/* The system call, or, where a container forbids it, the device it may have been given (Linux 6.1). */
static int open_userfaultfd(void)
{
    int flags = O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY;
    int fd = (int)syscall(SYS_userfaultfd, flags), failure = errno, device;
    if (fd >= 0 || (device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC)) < 0) {
        errno = failure;
        return fd;
    }
    fd = ioctl(device, _IO(0xAA, 0), flags); /* USERFAULTFD_IOC_NEW, which older headers do not have */
    failure = errno;
    close(device);
    errno = failure;
    return fd;
}

static PyObject *open_guard(PyObject *module, PyObject *args)
{
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_SIGBUS | UFFD_FEATURE_MISSING_SHMEM};
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO}, found;
    int fd = open_userfaultfd();
    if (fd < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (ioctl(fd, UFFDIO_API, &api) < 0 || sigaction(SIGBUS, NULL, &found) < 0)
        goto failed;
    if (found.sa_sigaction != on_sigbus && sigaction(SIGBUS, &action, &sigbus_before) < 0)
        goto failed;
    return PyLong_FromLong(fd);
failed:
    PyErr_SetFromErrno(PyExc_OSError);
    close(fd);
    return NULL;
}

static PyObject *guard_missing(PyObject *module, PyObject *args)
{
    int fd;
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "iKK", &fd, &address, &nbytes))
        return NULL;
    struct uffdio_register guarded = {.range = {.start = address, .len = nbytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (ioctl(fd, UFFDIO_REGISTER, &guarded) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    return Py_NewRef(Py_None);
}

/* Reading past the page cache. A disk is fastest when it has many reads at once, and the page cache costs more processor
   time than the disk does: reads go from the disk into the memory where the bytes are wanted, through a queue of the
   kernel (io_uring) that each gathering thread has for itself. Whatever cannot be read so, or comes back wrong, is read
   again through the page cache, and only that tells of damage. */
typedef struct {
    int fd; /* -1: the system has no such queue; 0: not asked for yet */
    unsigned *sq_tail, *sq_array, *cq_head, *cq_tail, sq_mask, cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    unsigned unsubmitted, in_flight;
    void *ring;
    size_t ring_bytes, sqes_bytes;
} Queue;

static __thread Queue queue;
static pthread_key_t queue_key; /* closes a thread's queue when the thread ends */

static void close_queue(void *ended)
{
    Queue *of_thread = ended;
    munmap(of_thread->ring, of_thread->ring_bytes);
    munmap(of_thread->sqes, of_thread->sqes_bytes);
    close(of_thread->fd);
    of_thread->fd = -1;
}

static int open_queue(void)
{
    struct io_uring_params made = {0};
    if (queue.fd)
        return queue.fd > 0;
    int fd = (int)syscall(SYS_io_uring_setup, QUEUE_DEPTH, &made);
    queue.fd = -1;
    if (fd < 0)
        return 0;
    size_t sq_bytes = made.sq_off.array + made.sq_entries * sizeof(unsigned);
    size_t cq_bytes = made.cq_off.cqes + made.cq_entries * sizeof(struct io_uring_cqe);
    size_t sqes_bytes = made.sq_entries * sizeof(struct io_uring_sqe);
    if (sq_bytes < cq_bytes)
        sq_bytes = cq_bytes;
    if (fd == 0 || !(made.features & IORING_FEAT_SINGLE_MMAP))
        goto no_queue;
    char *ring = mmap(NULL, sq_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQ_RING);
    if (ring == MAP_FAILED)
        goto no_queue;
    void *sqes = mmap(NULL, sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQES);
    if (sqes == MAP_FAILED) {
        munmap(ring, sq_bytes);
        goto no_queue;
    }
    queue = (Queue){
        .fd = fd,
        .sq_tail = (unsigned *)(ring + made.sq_off.tail),
        .sq_array = (unsigned *)(ring + made.sq_off.array),
        .cq_head = (unsigned *)(ring + made.cq_off.head),
        .cq_tail = (unsigned *)(ring + made.cq_off.tail),
        .sq_mask = *(unsigned *)(ring + made.sq_off.ring_mask),
        .cq_mask = *(unsigned *)(ring + made.cq_off.ring_mask),
        .sqes = sqes,
        .cqes = (struct io_uring_cqe *)(ring + made.cq_off.cqes),
        .ring = ring,
        .ring_bytes = sq_bytes,
        .sqes_bytes = sqes_bytes,
    };
    pthread_setspecific(queue_key, &queue);
    return 1;
no_queue:
    close(fd);
    return 0;
}

static void enqueue(int fd, uint8_t *target, unsigned nbytes, int64_t offset, uint64_t mark)
{
    unsigned tail = *queue.sq_tail, at = tail & queue.sq_mask;
    queue.sqes[at] = (struct io_uring_sqe){
        .opcode = IORING_OP_READ, .fd = fd, .off = offset, .addr = (uintptr_t)target, .len = nbytes, .user_data = mark};
    queue.sq_array[at] = at;
    atomic_store_explicit((_Atomic unsigned *)queue.sq_tail, tail + 1, memory_order_release);
    queue.unsubmitted++, queue.in_flight++;
}

/* Hand over what is queued, and wait until one read has ended. 0 where the kernel takes none now. */
static int submit(unsigned wait)
{
    int count;
    do
        count = (int)syscall(SYS_io_uring_enter, queue.fd, queue.unsubmitted, wait, IORING_ENTER_GETEVENTS, NULL, 0);
    while (count < 0 && errno == EINTR);
    if (count > 0)
        queue.unsubmitted -= count;
    return count >= 0;
}

static int next_completion(struct io_uring_cqe *ended)
{
    unsigned head = *queue.cq_head;
    if (head == atomic_load_explicit((_Atomic unsigned *)queue.cq_tail, memory_order_acquire))
        return 0;
    *ended = queue.cqes[head & queue.cq_mask];
    atomic_store_explicit((_Atomic unsigned *)queue.cq_head, head + 1, memory_order_release);
    queue.in_flight--;
    return 1;
}

/* Take back what the kernel has not been given, and wait for the rest: nothing may be written into memory that is the
   caller's again. */
static void drain(void)
{
    struct io_uring_cqe ended;
    struct timespec pause = {.tv_nsec = 1000000};
    atomic_store_explicit((_Atomic unsigned *)queue.sq_tail, *queue.sq_tail - queue.unsubmitted, memory_order_release);
    queue.in_flight -= queue.unsubmitted;
    queue.unsubmitted = 0;
    while (queue.in_flight)
        if (!next_completion(&ended) && !submit(1))
            nanosleep(&pause, NULL);
}

/* Whether the page cache has all of a row. Kernels before 6.5 do not tell: then it counts as having nothing. */
static int is_cached(const Row *row)
{
    struct { uint64_t offset, nbytes; } range = {row->offset + row->start, row->nbytes};
    struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } pages = {0};
    if (syscall(451 /* cachestat */, (int)row->fd, &range, &pages, 0) < 0)
        return 0;
    return pages.cached * 4096 >= (uint64_t)row->nbytes;
}

static uint8_t *read_to(const Row *row, uint8_t *base)
{
    return row->landing ? (uint8_t *)(uintptr_t)row->landing : base + row->target;
}

/* Whole blocks, at places where a disk can read by itself. */
static int can_be_direct(const Row *row, uint8_t *base)
{
    int64_t end = row->start + row->nbytes;
    return row->fd >= 0 && row->start % BLOCK_BYTES == 0 && (end % BLOCK_BYTES == 0 || end == row->extent_bytes) &&
           row->nbytes % DIRECT_ALIGNMENT == 0 && (row->offset + row->start) % DIRECT_ALIGNMENT == 0 &&
           (uintptr_t)read_to(row, base) % 512 == 0 && row->nbytes / DIRECT_BYTES_MAX < 1 << 16;
}

/* The files of one gather, opened once more for reading past the page cache, at most `left` more; by descriptor modulo
   DIRECT_FILES. */
typedef struct {
    int known[DIRECT_FILES], direct[DIRECT_FILES], left;
} DirectFiles;

static int direct_file(DirectFiles *files, int fd)
{
    char path[32];
    int at = fd % DIRECT_FILES;
    if (files->known[at] == 0 && files->left > 0) {
        files->left--;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        files->known[at] = fd + 1;
        files->direct[at] = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    }
    return files->known[at] == fd + 1 ? files->direct[at] : -1;
}

static void close_direct(DirectFiles *files)
{
    for (int at = 0; at < DIRECT_FILES; at++)
        if (files->known[at] && files->direct[at] >= 0)
            close(files->direct[at]);
}

/* How each row of a gather is read. */
typedef enum { AT_HAND, DIRECT, BUFFERED, DONE } How;

typedef struct {
    Row *rows;
    Py_ssize_t count, next; /* the next row to be queued, and of it the next read */
    unsigned next_read;
    const uint8_t *words;
    uint8_t *base, *how;
    int past_cache;
    DirectFiles files;
} Gather;

/* Queue reads of DIRECT rows while there is room. `mark` is the row's index and the number of the read in it. */
static void queue_reads(Gather *g)
{
    for (; g->next < g->count && queue.in_flight < QUEUE_DEPTH; g->next++, g->next_read = 0) {
        const Row *row = g->rows + g->next;
        if (g->how[g->next] != DIRECT)
            continue;
        int fd = direct_file(&g->files, (int)row->fd);
        if (fd < 0) {
            g->how[g->next] = BUFFERED;
            continue;
        }
        for (int64_t at = (int64_t)g->next_read * DIRECT_BYTES_MAX; at < row->nbytes; at += DIRECT_BYTES_MAX) {
            if (queue.in_flight == QUEUE_DEPTH)
                return;
            int64_t nbytes = row->nbytes - at < DIRECT_BYTES_MAX ? row->nbytes - at : DIRECT_BYTES_MAX;
            enqueue(fd, read_to(row, g->base) + at, (unsigned)nbytes, row->offset + row->start + at,
                    (uint64_t)g->next << 16 | g->next_read);
            g->next_read++;
        }
    }
}

/* Prove what has come, while other reads are under way. */
static void take_read(Gather *g, const struct io_uring_cqe *ended)
{
    Py_ssize_t index = ended->user_data >> 16;
    const Row *row = g->rows + index;
    int64_t at = (int64_t)(ended->user_data & 0xFFFF) * DIRECT_BYTES_MAX;
    int64_t nbytes = row->nbytes - at < DIRECT_BYTES_MAX ? row->nbytes - at : DIRECT_BYTES_MAX;
    uint8_t *read = read_to(row, g->base) + at;
    const uint8_t *words = g->words + 4 * (row->first_word + (row->start + at) / BLOCK_BYTES);
    if (ended->res != nbytes || first_bad(read, nbytes, words) >= 0)
        g->how[index] = BUFFERED;
    else if (row->landing && g->past_cache)
        copy_past_cache(g->base + row->target + at, read, nbytes);
    else if (row->landing)
        memcpy(g->base + row->target + at, read, nbytes);
}

/* Read every DIRECT row. Those that could not be read so are BUFFERED then. */
static void read_direct(Gather *g)
{
    struct io_uring_cqe ended;
    for (;;) {
        queue_reads(g);
        if (!queue.in_flight)
            break;
        if (!submit(1)) {
            drain();
            for (Py_ssize_t index = 0; index < g->count; index++)
                if (g->how[index] == DIRECT)
                    g->how[index] = BUFFERED;
            return;
        }
        while (next_completion(&ended))
            take_read(g, &ended);
    }
}

/* The disk is given its reads first, then come the rows at hand, and then the reads that have ended. Where reads go
   through the page cache, every one is started before the first is waited for, so that the disk has as many at once as
   there are rows. Of rows that do not lie at their landing afterwards, the landing is 0. */
static PyObject *gather(PyObject *module, PyObject *args)
{
    Py_buffer rows, words;
    unsigned long long address;
    int past_cache, direct_files_max;
    if (!PyArg_ParseTuple(args, "w*y*Kpi", &rows, &words, &address, &past_cache, &direct_files_max))
        return NULL;
    Gather *g = PyMem_Calloc(1, sizeof *g);
    volatile Py_ssize_t index = 0, failed_index = 0;
    const Py_ssize_t count = rows.len / (Py_ssize_t)sizeof(Row);
    uint8_t *how = PyMem_Calloc(count ? count : 1, 1);
    if (g == NULL || how == NULL) {
        PyMem_Free(g);
        PyMem_Free(how);
        PyBuffer_Release(&rows);
        PyBuffer_Release(&words);
        return PyErr_NoMemory();
    }
    g->rows = rows.buf, g->count = count, g->words = words.buf, g->how = how, g->past_cache = past_cache;
    g->base = (uint8_t *)(uintptr_t)address;
    g->files.left = direct_files_max;
    volatile Outcome outcome = GOOD;
    int64_t failed_at = 0;
    volatile int failure = 0;
    sigjmp_buf here;
    Py_BEGIN_ALLOW_THREADS
    if (sigsetjmp(here, 1)) {
        outcome = FAILED, failed_at = 0, failure = EFAULT;
        goto ended;
    }
    gathering = &here;
    int is_direct = direct_files_max > 0 && count < 1 << 24 && open_queue();
    for (index = 0; is_direct && index < count; index++)
        if (can_be_direct(g->rows + index, g->base) && !is_cached(g->rows + index))
            how[index] = DIRECT;
    if (is_direct) {
        queue_reads(g);
        submit(0);
    }
    for (index = 0; index < count && outcome == GOOD; index++) {
        if (how[index] != AT_HAND)
            continue;
        outcome = carry_out(g->rows + index, g->words, g->base, past_cache, &failed_at, NOWAIT);
        how[index] = DONE;
        if (outcome == COLD) {
            read_ahead(g->rows + index);
            how[index] = BUFFERED;
            outcome = GOOD;
        } else if (outcome != GOOD) {
            failed_index = index;
            failure = errno;
        }
        g->rows[index].landing = 0;
    }
    if (is_direct && outcome == GOOD)
        read_direct(g);
    for (index = 0; index < count && outcome == GOOD; index++) {
        if (how[index] != BUFFERED)
            continue;
        g->rows[index].landing = 0;
        outcome = carry_out(g->rows + index, g->words, g->base, past_cache, &failed_at, WAIT);
        if (outcome != GOOD) {
            failed_index = index;
            failure = errno;
        }
    }
ended:
    gathering = NULL;
    if (queue.fd > 0)
        drain();
    close_direct(&g->files);
    Py_END_ALLOW_THREADS
    PyMem_Free(g);
    PyMem_Free(how);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&words);
    return outcome == GOOD ? PyTuple_New(0) : Py_BuildValue("nLii", (Py_ssize_t)failed_index, (long long)failed_at, (int)outcome, failure);
}

static int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wait for the connection out of what patience is left: all waits of one call together, or a reader that takes a little
   at a time would keep the thread. */
static int becomes_writable(int fd, int64_t *patience_ns)
{
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    if (*patience_ns <= 0)
        return 0;
    int64_t began_ns = monotonic_ns();
    int found = poll(&ready, 1, (int)((*patience_ns + 999999) / 1000000));
    *patience_ns -= monotonic_ns() - began_ns;
    return found > 0;
}

static PyObject *send_spans(PyObject *module, PyObject *args)
{
    Py_buffer spans;
    int fd, patience_ms;
    int64_t patience_ns;
    Py_ssize_t start;
    if (!PyArg_ParseTuple(args, "iy*ni", &fd, &spans, &start, &patience_ms))
        return NULL;
    patience_ns = (int64_t)patience_ms * 1000000;
    const int64_t *span = spans.buf, *end = span + spans.len / 8;
    Py_ssize_t sent = 0;
    ssize_t count = 1;
    int failure = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; span < end && start >= span[1]; span += 2)
        start -= span[1];
    while (span < end && count > 0) {
        struct iovec vectors[SEND_SPANS];
        struct msghdr message = {.msg_iov = vectors};
        size_t total = 0;
        for (const int64_t *next = span; next < end && message.msg_iovlen < SEND_SPANS && total < SEND_BYTES; next += 2) {
            size_t skip = next == span ? start : 0, nbytes = next[1] - skip;
            if (nbytes > SEND_BYTES - total)
                nbytes = SEND_BYTES - total;
            vectors[message.msg_iovlen++] = (struct iovec){(uint8_t *)(uintptr_t)next[0] + skip, nbytes};
            total += nbytes;
        }
        do
            count = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        while (count < 0 && (errno == EINTR || (errno == EAGAIN && becomes_writable(fd, &patience_ns))));
        if (count < 0)
            failure = errno;
        else
            for (sent += count, start += count; span < end && start >= span[1]; span += 2)
                start -= span[1];
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&spans);
    if (failure && failure != EAGAIN && failure != EINTR) {
        errno = failure;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromSsize_t(sent);
}

static PyObject *scatter(PyObject *module, PyObject *args)
{
    Py_buffer target, spans, data;
    Py_ssize_t start;
    if (!PyArg_ParseTuple(args, "w*y*ny*", &target, &spans, &start, &data))
        return NULL;
    const int64_t *span = spans.buf, *end = span + spans.len / 16 * 2;
    const uint8_t *from = data.buf;
    Py_ssize_t left = data.len;
    int is_inside = start >= 0 && spans.len % 16 == 0;
    for (; is_inside && span < end && start >= span[1]; span += 2) {
        is_inside = span[1] >= 0;
        start -= span[1];
    }
    for (; is_inside && left && span < end; span += 2, start = 0) {
        is_inside = span[0] >= 0 && span[1] >= 0 && span[0] <= target.len && span[1] <= target.len - span[0];
        if (!is_inside)
            break;
        Py_ssize_t nbytes = span[1] - start < left ? span[1] - start : left;
        memcpy((uint8_t *)target.buf + span[0] + start, from, nbytes);
        from += nbytes;
        left -= nbytes;
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&spans);
    PyBuffer_Release(&data);
    if (!is_inside || left) {
        PyErr_SetString(PyExc_ValueError, "a span outside of the target, or too few");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *first_bad_block(PyObject *module, PyObject *args)
{
    Py_buffer data, words;
    Py_ssize_t first;
    if (!PyArg_ParseTuple(args, "y*y*n", &data, &words, &first))
        return NULL;
    int64_t bad;
    Py_ssize_t blocks = (data.len + BLOCK_BYTES - 1) / BLOCK_BYTES, known = words.len / 4 - first;
    if (first < 0 || known < blocks) {
        bad = known > 0 ? known : 0;
    } else if (data.len <= SHORT_BYTES) {
        bad = first_bad(data.buf, data.len, (const uint8_t *)words.buf + 4 * first);
    } else {
        Py_BEGIN_ALLOW_THREADS
        bad = first_bad(data.buf, data.len, (const uint8_t *)words.buf + 4 * first);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&words);
    return bad < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(first + bad);
}

static PyObject *block_words(PyObject *module, PyObject *args)
{
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    PyObject *words = PyBytes_FromStringAndSize(NULL, (data.len + BLOCK_BYTES - 1) / BLOCK_BYTES * 4);
    if (words != NULL && data.len <= SHORT_BYTES) {
        all_words(data.buf, data.len, (uint8_t *)PyBytes_AsString(words));
    } else if (words != NULL) {
        uint8_t *target = (uint8_t *)PyBytes_AsString(words);
        Py_BEGIN_ALLOW_THREADS
        all_words(data.buf, data.len, target);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return words;
}

static PyObject *crc32c(PyObject *module, PyObject *args)
{
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I", &data, &crc))
        return NULL;
    if (data.len <= SHORT_BYTES) {
        crc = ~crc_run(~crc, data.buf, data.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = ~crc_run(~crc, data.buf, data.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* KIVI (kv_codecs.kivi): numbers of a few bits, with a scale and a zero for each group, become elements. The results are
   the bits that numpy's float32 gives: no multiplication is joined with an addition. */

#if defined(__x86_64__) && defined(__clang__)
#define WIDE __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#elif defined(__x86_64__)
#define WIDE __attribute__((target_clones("arch=skylake-avx512", "avx2", "default"), optimize("O3")))
#else
#define WIDE
#endif
#define ROW_MAX 65536

enum { ELEMENT_FLOAT16 = 1, ELEMENT_BFLOAT16 = 2, ELEMENT_FLOAT32 = 3 };

static float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023, bits;
    if (exponent == 31)
        bits = sign | 0x7F800000u | mantissa << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else if (mantissa) {
        int shift = __builtin_clz(mantissa) - 21;
        bits = sign | (uint32_t)(113 - shift) << 23 | (mantissa << shift & 1023) << 13;
    } else
        bits = sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t float_to_half(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    if (size >= 0x47800000u)
        return (uint16_t)(sign | (size > 0x7F800000u ? 0x7E00u : 0x7C00u));
    if (size < 0x38800000u) { /* subnormal: let the addition round */
        float shifted;
        memcpy(&shifted, &size, 4);
        shifted += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &shifted, 4);
        return (uint16_t)(sign | (rounded - 0x3F000000u));
    }
    uint32_t odd = size >> 13 & 1;
    return (uint16_t)(sign | (size - 0x38000000u + 0xFFFu + odd) >> 13);
}

WIDE static void unpack_row(const uint8_t *restrict packed, uint8_t *restrict numbers, size_t count, int bits)
{
    size_t whole;
    switch (bits) {
    case 4:
        whole = count / 2;
        for (size_t at = 0; at < whole; at++) {
            numbers[2 * at] = packed[at] & 15;
            numbers[2 * at + 1] = packed[at] >> 4;
        }
        if (count & 1)
            numbers[count - 1] = packed[whole] & 15;
        return;
    case 2:
        whole = count / 4;
        for (size_t at = 0; at < whole; at++) { /* bits 2n and 2n + 1 become the lowest of byte n */
            uint32_t byte = packed[at], four = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
            memcpy(numbers + 4 * at, &four, 4);
        }
        for (size_t at = 4 * whole; at < count; at++)
            numbers[at] = packed[at / 4] >> 2 * (at & 3) & 3;
        return;
    default:
        whole = count / 8;
        for (size_t at = 0; at < whole; at++) { /* 12 bits at a time: bits 3n to 3n + 2 become the lowest of byte n */
            const uint8_t *triple = packed + 3 * at;
            uint32_t low = triple[0] | (triple[1] & 15u) << 8, high = triple[1] >> 4 | (uint32_t)triple[2] << 4;
            low = (low | low << 10) & 0x003F003Fu;
            low = (low | low << 5) & 0x07070707u;
            high = (high | high << 10) & 0x003F003Fu;
            high = (high | high << 5) & 0x07070707u;
            memcpy(numbers + 8 * at, &low, 4);
            memcpy(numbers + 8 * at + 4, &high, 4);
        }
        for (size_t at = 8 * whole; at < count; at++) {
            const uint8_t *triple = packed + at / 8 * 3;
            uint32_t word = triple[0] | triple[1] << 8 | (uint32_t)triple[2] << 16;
            numbers[at] = word >> 3 * (at & 7) & 7;
        }
    }
}

static uint8_t number_at(const uint8_t *packed, size_t at, int bits)
{
    if (bits == 3) {
        const uint8_t *triple = packed + at / 8 * 3;
        uint32_t word = triple[0] | triple[1] << 8 | (uint32_t)triple[2] << 16;
        return word >> 3 * (at & 7) & 7;
    }
    size_t each = 8 / bits;
    return packed[at / each] >> bits * (at % each) & ((1 << bits) - 1);
}

WIDE static void scale_row(const uint8_t *restrict numbers, const float *restrict scale, const float *restrict zero,
                           float *restrict row, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        float product = (float)numbers[at] * scale[at];
        row[at] = product + zero[at];
    }
}

WIDE static void store_bfloat16(const float *restrict row, uint8_t *restrict out, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        uint32_t bits;
        memcpy(&bits, row + at, 4);
        uint16_t element = (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
        memcpy(out + 2 * at, &element, 2);
    }
}

/* scale_row and store_bfloat16 in one pass; with `scale` and `zero` of each element, or of each group of `span`. */
WIDE static void scale_to_bfloat16(const uint8_t *restrict numbers, const float *restrict scale,
                                   const float *restrict zero, uint8_t *restrict out, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        float product = (float)numbers[at] * scale[at];
        float value = product + zero[at];
        uint32_t bits;
        memcpy(&bits, &value, 4);
        uint16_t element = (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
        memcpy(out + 2 * at, &element, 2);
    }
}

WIDE static void scale_groups_to_bfloat16(const uint8_t *restrict numbers, const float *restrict scale,
                                          const float *restrict zero, uint8_t *restrict out, size_t groups, size_t span)
{
    for (size_t group = 0; group < groups; group++) {
        float group_scale = scale[group], group_zero = zero[group];
        const uint8_t *from = numbers + group * span;
        uint8_t *to = out + 2 * group * span;
        for (size_t at = 0; at < span; at++) {
            float product = (float)from[at] * group_scale;
            float value = product + group_zero;
            uint32_t bits;
            memcpy(&bits, &value, 4);
            uint16_t element = (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
            memcpy(to + 2 * at, &element, 2);
        }
    }
}

static void store_row(const float *row, uint8_t *out, size_t count, int element)
{
    if (element == ELEMENT_FLOAT32)
        memcpy(out, row, 4 * count);
    else if (element == ELEMENT_BFLOAT16)
        store_bfloat16(row, out, count);
    else
        for (size_t at = 0; at < count; at++) {
            uint16_t half = float_to_half(row[at]);
            memcpy(out + 2 * at, &half, 2);
        }
}

static size_t packed_size(size_t count, int bits)
{
    return bits == 3 ? (count + 7) / 8 * 3 : (count * bits + 7) / 8;
}

static void read_halves(const uint8_t *from, float *to, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        uint16_t half;
        memcpy(&half, from + 2 * at, 2);
        to[at] = half_to_float(half);
    }
}

/* One half of a layer. `step` tokens share the scales of a channel (keys), or `span` channels those of a token. */
static const uint8_t *decode_half(const uint8_t *payload, size_t tokens, size_t width, int bits, size_t step, size_t span,
                                  int element, uint8_t *out, float *memory)
{
    float *scale = memory, *zero = memory + width, *row = memory + 2 * width;
    uint8_t *unpacked = (uint8_t *)(memory + 3 * width);
    size_t groups = tokens / step * (width / span), element_bytes = element == ELEMENT_FLOAT32 ? 4 : 2;
    const uint8_t *scales = payload, *zeros = payload + 2 * groups, *packed = payload + 4 * groups;
    size_t each = bits == 3 ? 8 : 8 / bits, row_groups = width / span;
    for (size_t token = 0; token < tokens; token++) {
        if (token % step == 0) {
            size_t first = token / step * row_groups;
            if (span == 1 || element == ELEMENT_BFLOAT16) {
                read_halves(scales + 2 * first, scale, row_groups);
                read_halves(zeros + 2 * first, zero, row_groups);
            } else
                for (size_t group = 0; group < row_groups; group++) {
                    float group_scale, group_zero;
                    read_halves(scales + 2 * (first + group), &group_scale, 1);
                    read_halves(zeros + 2 * (first + group), &group_zero, 1);
                    for (size_t at = 0; at < span; at++) {
                        scale[group * span + at] = group_scale;
                        zero[group * span + at] = group_zero;
                    }
                }
        }
        size_t start = token * width;
        const uint8_t *numbers = bits == 8 ? packed + start : unpacked;
        if (bits < 8 && start % each == 0)
            unpack_row(packed + (bits == 3 ? start / 8 * 3 : start / each), unpacked, width, bits);
        else if (bits < 8)
            for (size_t at = 0; at < width; at++)
                unpacked[at] = number_at(packed, start + at, bits);
        if (element != ELEMENT_BFLOAT16) {
            scale_row(numbers, scale, zero, row, width);
            store_row(row, out + start * element_bytes, width, element);
        } else if (span == 1)
            scale_to_bfloat16(numbers, scale, zero, out + start * element_bytes, width);
        else
            scale_groups_to_bfloat16(numbers, scale, zero, out + start * element_bytes, row_groups, span);
    }
    return packed + packed_size(tokens * width, bits);
}

static int is_packable(int bits)
{
    return bits == 8 || bits == 4 || bits == 3 || bits == 2;
}

/* Whether such a layer can be, and then the bytes of its payload and of its keys. */
static int kivi_sizes(Py_ssize_t tokens, Py_ssize_t width, Py_ssize_t key_step, Py_ssize_t value_span, int key_bits,
                      int value_bits, int element, size_t *payload_bytes, size_t *half_bytes)
{
    if (!is_packable(key_bits) || !is_packable(value_bits) || element < 1 || element > 3)
        return 0;
    if (tokens < 1 || tokens > ROW_MAX || width < 1 || width > ROW_MAX || key_step < 1 || value_span < 1 ||
        tokens % key_step || width % value_span)
        return 0;
    size_t half = (size_t)tokens * width, key_groups = (size_t)(tokens / key_step) * width;
    size_t value_groups = (size_t)tokens * (width / value_span);
    *payload_bytes = 4 * (key_groups + value_groups) + packed_size(half, key_bits) + packed_size(half, value_bits);
    *half_bytes = half * (element == ELEMENT_FLOAT32 ? 4 : 2);
    return 1;
}

static PyObject *kivi_decode(PyObject *self, PyObject *args)
{
    Py_buffer payload, out;
    Py_ssize_t tokens, width, key_step, value_span;
    int key_bits, value_bits, element;
    if (!PyArg_ParseTuple(args, "y*nnnniiiw*", &payload, &tokens, &width, &key_step, &value_span, &key_bits, &value_bits,
                          &element, &out))
        return NULL;
    PyObject *result = NULL;
    size_t wanted, half_bytes;
    if (kivi_sizes(tokens, width, key_step, value_span, key_bits, value_bits, element, &wanted, &half_bytes)) {
        if ((size_t)payload.len == wanted && (size_t)out.len == 2 * half_bytes) {
            float *memory = malloc((3 * sizeof(float) + 1) * (size_t)width);
            if (memory) {
                Py_BEGIN_ALLOW_THREADS;
                uint8_t *values = (uint8_t *)out.buf + half_bytes;
                const uint8_t *rest =
                    decode_half(payload.buf, tokens, width, key_bits, key_step, 1, element, out.buf, memory);
                decode_half(rest, tokens, width, value_bits, 1, value_span, element, values, memory);
                Py_END_ALLOW_THREADS;
                free(memory);
                result = Py_NewRef(Py_None);
            } else
                PyErr_NoMemory();
        } else
            PyErr_SetString(PyExc_ValueError, "payload or room of another size");
    } else
        PyErr_SetString(PyExc_ValueError, "no such layer");
    PyBuffer_Release(&payload);
    PyBuffer_Release(&out);
    return result;
}

WIDE static void load_bfloat16(const uint8_t *restrict from, float *restrict row, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        uint16_t element;
        memcpy(&element, from + 2 * at, 2);
        uint32_t bits = (uint32_t)element << 16;
        memcpy(row + at, &bits, 4);
    }
}

static void load_row(const uint8_t *from, float *row, size_t count, int element)
{
    if (element == ELEMENT_FLOAT32)
        memcpy(row, from, 4 * count);
    else if (element == ELEMENT_BFLOAT16)
        load_bfloat16(from, row, count);
    else
        read_halves(from, row, count);
}

#define HALF_MAX 65504.0f

/* NaN becomes 0, and what no float16 can be is clipped. */
WIDE static void clip_row(float *restrict row, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        float value = row[at];
        value = value == value ? value : 0.0f;
        value = value > HALF_MAX ? HALF_MAX : value;
        row[at] = value < -HALF_MAX ? -HALF_MAX : value;
    }
}

WIDE static void widen_range(const float *restrict row, float *restrict least, float *restrict greatest, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        least[at] = row[at] < least[at] ? row[at] : least[at];
        greatest[at] = row[at] > greatest[at] ? row[at] : greatest[at];
    }
}

WIDE static void number_row(const float *restrict row, const float *restrict scale, const float *restrict zero,
                            uint8_t *restrict numbers, size_t count, float levels)
{
    for (size_t at = 0; at < count; at++) {
        float step = scale[at] > 0 ? scale[at] : 1.0f;
        float number = __builtin_rintf((row[at] - zero[at]) / step);
        number = number < 0 ? 0 : number;
        number = number > levels ? levels : number;
        numbers[at] = scale[at] > 0 ? (uint8_t)number : 0;
    }
}

WIDE static void pack_numbers(const uint8_t *restrict numbers, uint8_t *restrict packed, size_t count, int bits)
{
    size_t whole;
    switch (bits) {
    case 8:
        memcpy(packed, numbers, count);
        return;
    case 4:
        whole = count / 2;
        for (size_t at = 0; at < whole; at++)
            packed[at] = numbers[2 * at] | numbers[2 * at + 1] << 4;
        if (count & 1)
            packed[whole] = numbers[count - 1];
        return;
    case 2:
        whole = count / 4;
        for (size_t at = 0; at < whole; at++)
            packed[at] = numbers[4 * at] | numbers[4 * at + 1] << 2 | numbers[4 * at + 2] << 4 | numbers[4 * at + 3] << 6;
        if (count & 3) {
            packed[whole] = 0;
            for (size_t at = 4 * whole; at < count; at++)
                packed[whole] |= numbers[at] << 2 * (at & 3);
        }
        return;
    default:
        for (size_t at = 0; at < count; at += 8) {
            uint32_t word = 0;
            for (size_t lane = 0; lane < 8 && at + lane < count; lane++)
                word |= (uint32_t)numbers[at + lane] << 3 * lane;
            for (int byte = 0; byte < 3; byte++)
                packed[at / 8 * 3 + byte] = word >> 8 * byte;
        }
    }
}

/* A group's scale and zero, as the float16 that is stored and as the float that the numbers go by. Of zeros with both
   signs either may be the least; adding zero makes it the positive one, so that equal groups have equal bytes. */
static void settle_group(float least, float greatest, float levels, uint8_t *scales, uint8_t *zeros, float *scale,
                         float *zero)
{
    least += 0.0f;
    float step = (greatest + 0.0f - least) / levels;
    uint16_t half_scale = float_to_half(step < HALF_MAX ? step : HALF_MAX), half_zero = float_to_half(least);
    memcpy(scales, &half_scale, 2);
    memcpy(zeros, &half_zero, 2);
    *scale = half_to_float(half_scale);
    *zero = half_to_float(half_zero);
}

/* One half of a layer into a payload: the inverse of decode_half. `memory` has room for 5 rows of floats, `rows` for
   `step` rows, and `numbers` for all of them. */
static uint8_t *encode_half(const uint8_t *half, size_t tokens, size_t width, int bits, size_t step, size_t span, int element,
                            uint8_t *payload, float *memory, float *rows, uint8_t *numbers)
{
    float *scale = memory, *zero = memory + width, *least = memory + 2 * width, *greatest = memory + 3 * width;
    float levels = (float)((1 << bits) - 1);
    size_t row_groups = width / span, groups = tokens / step * row_groups, element_bytes = element == ELEMENT_FLOAT32 ? 4 : 2;
    uint8_t *scales = payload, *zeros = payload + 2 * groups, *packed = payload + 4 * groups;
    for (size_t first = 0; first < tokens; first += step) {
        size_t group = first / step * row_groups;
        for (size_t token = 0; token < step; token++) {
            float *row = rows + token * width;
            load_row(half + (first + token) * width * element_bytes, row, width, element);
            clip_row(row, width);
            if (!token) {
                memcpy(least, row, 4 * width);
                memcpy(greatest, row, 4 * width);
            } else
                widen_range(row, least, greatest, width);
        }
        for (size_t at = 0; at < row_groups; at++) {
            float low = least[at * span], high = greatest[at * span];
            for (size_t lane = 1; lane < span; lane++) {
                low = least[at * span + lane] < low ? least[at * span + lane] : low;
                high = greatest[at * span + lane] > high ? greatest[at * span + lane] : high;
            }
            settle_group(low, high, levels, scales + 2 * (group + at), zeros + 2 * (group + at), scale + at * span,
                         zero + at * span);
            for (size_t lane = 1; lane < span; lane++) {
                scale[at * span + lane] = scale[at * span];
                zero[at * span + lane] = zero[at * span];
            }
        }
        for (size_t token = 0; token < step; token++)
            number_row(rows + token * width, scale, zero, numbers + (first + token) * width, width, levels);
    }
    pack_numbers(numbers, packed, tokens * width, bits);
    return packed + packed_size(tokens * width, bits);
}

static PyObject *kivi_encode(PyObject *self, PyObject *args)
{
    Py_buffer layer, out;
    Py_ssize_t tokens, width, key_step, value_span;
    int key_bits, value_bits, element;
    if (!PyArg_ParseTuple(args, "y*nnnniiiw*", &layer, &tokens, &width, &key_step, &value_span, &key_bits, &value_bits,
                          &element, &out))
        return NULL;
    PyObject *result = NULL;
    size_t wanted, half_bytes;
    if (kivi_sizes(tokens, width, key_step, value_span, key_bits, value_bits, element, &wanted, &half_bytes)) {
        if ((size_t)out.len == wanted && (size_t)layer.len == 2 * half_bytes) {
            float *memory = malloc(4 * sizeof(float) * (size_t)width), *rows = malloc(4 * (size_t)(key_step * width));
            uint8_t *numbers = malloc((size_t)tokens * width);
            if (memory && rows && numbers) {
                Py_BEGIN_ALLOW_THREADS;
                const uint8_t *values = (const uint8_t *)layer.buf + half_bytes;
                uint8_t *rest =
                    encode_half(layer.buf, tokens, width, key_bits, key_step, 1, element, out.buf, memory, rows, numbers);
                encode_half(values, tokens, width, value_bits, 1, value_span, element, rest, memory, rows, numbers);
                Py_END_ALLOW_THREADS;
                result = Py_NewRef(Py_None);
            } else
                PyErr_NoMemory();
            free(memory);
            free(rows);
            free(numbers);
        } else
            PyErr_SetString(PyExc_ValueError, "layer or room of another size");
    } else
        PyErr_SetString(PyExc_ValueError, "no such layer");
    PyBuffer_Release(&layer);
    PyBuffer_Release(&out);
    return result;
}

/* Sums of squares: of the elements of `exact`, and of those of `decoded` less them. */
static PyObject *squares(PyObject *self, PyObject *args)
{
    Py_buffer exact, decoded;
    int element;
    if (!PyArg_ParseTuple(args, "y*y*i", &exact, &decoded, &element))
        return NULL;
    PyObject *result = NULL;
    size_t element_bytes = element == ELEMENT_FLOAT32 ? 4 : 2;
    if (element >= 1 && element <= 3 && exact.len == decoded.len && exact.len % element_bytes == 0) {
        double whole = 0, lost = 0;
        float rows[2][256];
        Py_BEGIN_ALLOW_THREADS;
        size_t count = exact.len / element_bytes;
        for (size_t first = 0; first < count; first += 256) {
            size_t part = count - first < 256 ? count - first : 256;
            load_row((const uint8_t *)exact.buf + first * element_bytes, rows[0], part, element);
            load_row((const uint8_t *)decoded.buf + first * element_bytes, rows[1], part, element);
            double part_whole = 0, part_lost = 0;
            for (size_t at = 0; at < part; at++) {
                double difference = rows[1][at] - rows[0][at];
                part_whole += (double)rows[0][at] * rows[0][at];
                part_lost += difference * difference;
            }
            whole += part_whole;
            lost += part_lost;
        }
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("dd", whole, lost);
    } else
        PyErr_SetString(PyExc_ValueError, "layers of different sizes");
    PyBuffer_Release(&exact);
    PyBuffer_Release(&decoded);
    return result;
}

/* Encoded layers of many chunks, whose heads are all `head` but for the checksum behind it. A row of `places` has the
   offset of an encoded layer in `source`, and that of its place in `out`. With `is_in_place` the two are one memory, and a
   layer is copied before it is decoded. Returns the row of the first layer that is not as it should be, or -1. */

enum { HEAD_BYTES = 24, CHECKED_HEAD_BYTES = 20 };

static PyObject *kivi_decode_many(PyObject *self, PyObject *args)
{
    Py_buffer source, head, places, out;
    Py_ssize_t tokens, width, key_step, value_span;
    int key_bits, value_bits, element, is_in_place;
    if (!PyArg_ParseTuple(args, "y*y*y*nnnniiipw*", &source, &head, &places, &tokens, &width, &key_step, &value_span,
                          &key_bits, &value_bits, &element, &is_in_place, &out))
        return NULL;
    PyObject *result = NULL;
    size_t payload_bytes, half_bytes;
    if (!kivi_sizes(tokens, width, key_step, value_span, key_bits, value_bits, element, &payload_bytes, &half_bytes) ||
        head.len != CHECKED_HEAD_BYTES || places.len % 16) {
        PyErr_SetString(PyExc_ValueError, "no such layers");
        goto done;
    }
    size_t nbytes = HEAD_BYTES + payload_bytes, count = places.len / 16;
    const int64_t *rows = places.buf;
    for (size_t at = 0; at < count; at++) {
        int64_t from = rows[2 * at], to = rows[2 * at + 1];
        if (from < 0 || to < 0 || (size_t)source.len < nbytes || (size_t)from > source.len - nbytes ||
            (size_t)out.len < 2 * half_bytes || (size_t)to > out.len - 2 * half_bytes) {
            PyErr_SetString(PyExc_ValueError, "a place is outside of its memory");
            goto done;
        }
    }
    float *memory = malloc((3 * sizeof(float) + 1) * (size_t)width);
    uint8_t *copy = is_in_place ? malloc(nbytes) : NULL;
    if (!memory || (is_in_place && !copy)) {
        free(memory);
        free(copy);
        PyErr_NoMemory();
        goto done;
    }
    Py_ssize_t bad = -1;
    Py_BEGIN_ALLOW_THREADS;
    for (size_t at = 0; at < count && bad < 0; at++) {
        const uint8_t *layer = (const uint8_t *)source.buf + rows[2 * at];
        uint8_t *place = (uint8_t *)out.buf + rows[2 * at + 1];
        uint32_t stored;
        if (copy)
            layer = memcpy(copy, layer, nbytes);
        memcpy(&stored, layer + CHECKED_HEAD_BYTES, 4);
        uint32_t found = crc_run(~0u, layer, CHECKED_HEAD_BYTES);
        found = ~crc_run(found, layer + HEAD_BYTES, payload_bytes);
        if (memcmp(layer, head.buf, CHECKED_HEAD_BYTES) || stored != found) {
            bad = (Py_ssize_t)at;
            break;
        }
        const uint8_t *rest =
            decode_half(layer + HEAD_BYTES, tokens, width, key_bits, key_step, 1, element, place, memory);
        decode_half(rest, tokens, width, value_bits, 1, value_span, element, place + half_bytes, memory);
    }
    Py_END_ALLOW_THREADS;
    free(memory);
    free(copy);
    result = PyLong_FromSsize_t(bad);
done:
    PyBuffer_Release(&source);
    PyBuffer_Release(&head);
    PyBuffer_Release(&places);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"kivi_encode", kivi_encode, METH_VARARGS, NULL},
    {"squares", squares, METH_VARARGS, NULL},
    {"kivi_decode_many", kivi_decode_many, METH_VARARGS, NULL},
    {"kivi_decode", kivi_decode, METH_VARARGS, NULL},
    {"gather", gather, METH_VARARGS, NULL},
    {"guard_missing", guard_missing, METH_VARARGS, NULL},
    {"open_guard", open_guard, METH_NOARGS, NULL},
    {"send_spans", send_spans, METH_VARARGS, NULL},
    {"scatter", scatter, METH_VARARGS, NULL},
    {"block_words", block_words, METH_VARARGS, NULL},
    {"first_bad_block", first_bad_block, METH_VARARGS, NULL},
    {"crc32c", crc32c, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "objectcache.adapters.native",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_native(void)
{
    make_software_table();
    if (pthread_key_create(&queue_key, close_queue))
        return PyErr_NoMemory();
#ifdef HARDWARE
    if (has_hardware_crc()) {
        crc_run = crc_hardware;
        crc_lanes = crc_lanes_hardware;
    }
#endif
    return PyModule_Create(&definition);
}
