/* arena.c — anonymous memory, touched by many threads, then registered; or the device's.
 *
 * Order matters: a page must exist before the driver pins it, and the threads of the pool make
 * pages several times as fast as the driver does alone (which is why cudaHostAlloc is not used). */
#include "arena.h"

#include "forks.h"
#include "lock.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE_BYTES  ((size_t)2 << 20)   /* a huge page on x86-64 and on arm64 with 4 KiB pages */
#define CHUNK_BYTES ((size_t)16 << 20)  /* touched by one thread at a go: 8 huge pages */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25                /* Linux 6.1 */
#endif

static _Alignas(512) char nothing[512]; /* where arenas of no bytes point; never read or written */

/* ---- nodes: from sysfs, and by the kernel's own calls, without a library -------------------- */

/* "0-3,8" */
static void parse(const char *list, mt_nodes *out)
{
    unsigned long from, to;
    int           used;

    memset(out, 0, sizeof *out);
    while (sscanf(list, "%lu%n", &from, &used) == 1) {
        list += used;
        to = from;
        if (sscanf(list, "-%lu%n", &to, &used) == 1)
            list += used;
        for (; from <= to && from < MT_NODES; from++)
            out->bits[from / MT_NODE_BITS] |= 1ul << from % MT_NODE_BITS;
        list += *list == ',';
    }
}

/* Leaves out what is not in a file's list; without the file nothing.
 * prefix: of the line that has it. */
static void keep_listed(const char *path, const char *prefix, mt_nodes *nodes)
{
    char     line[4096];
    mt_nodes listed;
    FILE    *f = fopen(path, "re");

    if (f == NULL)
        return;
    while (fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, prefix, strlen(prefix)) != 0)
            continue;
        parse(line + strlen(prefix), &listed);
        for (size_t i = 0; i < sizeof nodes->bits / sizeof *nodes->bits; i++)
            nodes->bits[i] &= listed.bits[i];
        break;
    }
    (void)fclose(f);
}

void mt__nodes_read(const char *sys, const char *status, mt_nodes *out)
{
    static const char *const lists[] = { "online", "has_cpu", "has_memory" };
    char path[4096];

    memset(out, 0xff, sizeof *out);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        (void)snprintf(path, sizeof path, "%s/devices/system/node/%s", sys, lists[i]);
        keep_listed(path, "", out);
    }
    keep_listed(status, "Mems_allowed_list:", out);
    out->n = 0;
    for (size_t i = 0; i < sizeof out->bits / sizeof *out->bits; i++)
        out->n += __builtin_popcountl(out->bits[i]);
    if (out->n == 0 || out->n == MT_NODES) {         /* nothing is known */
        parse("0", out);
        out->n = 1;
    }
}

static mt_nodes here;                                /* written once */

static void read_here(void)
{
    mt__nodes_read("/sys", "/proc/self/status", &here);
}

const mt_nodes *mt_nodes_here(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, read_here);
    return &here;
}

int mt__numa_place(const mt_nodes *nodes, void *p, size_t bytes)
{
    /* The kernel takes one bit less than it is told of. */
    unsigned long bits = nodes != NULL ? (unsigned long)MT_NODES + 1 : 0;

    return syscall(SYS_mbind, p, bytes, nodes != NULL ? MPOL_INTERLEAVE : MPOL_LOCAL,
                   nodes != NULL ? nodes->bits : NULL, bits, 0u) == 0 ? 0 : errno;
}

/* Where there is a choice, and the user has made none. A wish: without it memory is just slower. */
static void place(void *p, size_t bytes, int local)
{
    int mode = MPOL_DEFAULT;

    if (mt_nodes_here()->n > 1 &&
        syscall(SYS_get_mempolicy, &mode, NULL, 0ul, NULL, 0ul) == 0 && mode == MPOL_DEFAULT)
        (void)mt__numa_place(local ? NULL : mt_nodes_here(), p, bytes);
}

/* ---- arenas ------------------------------------------------------------------------------- */

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static double mib(size_t bytes)
{
    return (double)bytes / (1 << 20);
}

/* Maps `bytes` at a multiple of `align` (a multiple of a page): maps more, cuts off both ends. */
static void *map_aligned(size_t bytes, size_t align, int flags)
{
    size_t spare = align - page_bytes();
    char  *map, *base;

    if (bytes > SIZE_MAX - spare)
        return MAP_FAILED;
    map = mmap(NULL, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags,
               -1, 0);
    if (map == MAP_FAILED || spare == 0)
        return map;
    base = map + (-(uintptr_t)map & (align - 1));
    if (base > map)
        munmap(map, (size_t)(base - map));
    if (map + spare > base)
        munmap(base + bytes, (size_t)(map + spare - base));
    return base;
}

/* The first byte that is, or would be, committed. */
static char *first_of(const mt_arena *a)
{
    return (char *)a->base + a->from;
}

/* It keeps what it holds. */
static void touch_page(char *at)
{
    (void)__atomic_fetch_or(at, 0, __ATOMIC_RELAXED);
}

/* Pool threads; each page is written by one of them. */
static void touch_chunk(void *arg, int64_t chunk)
{
    const mt_arena *a = arg;
    size_t          page = page_bytes(), at = (size_t)chunk * CHUNK_BYTES;
    size_t          end = a->kept - at < CHUNK_BYTES ? a->kept : at + CHUNK_BYTES;
    char           *base = first_of(a), *huge, *first;

    huge = first = base + at + (-(uintptr_t)(base + at) & (HUGE_BYTES - 1));
    /* The kernel makes huge pages of what may be one, whatever it does by itself with shared
     * memory: of blocks that begin in this chunk and end in the arena, once a page of each is
     * there. That page says on which node of memory. Pages take turns among nodes (arena.h), and so
     * do blocks where the page is five further in each: 512 + 5 has no factor in common with
     * numbers of nodes. */
    for (; a->shared && HUGE_BYTES % page == 0 && huge < base + end &&
           huge + HUGE_BYTES <= base + a->kept; huge += HUGE_BYTES)
        touch_page(huge + (uintptr_t)huge / HUGE_BYTES * 5 % (HUGE_BYTES / page) * page);
    if (huge > first)
        (void)madvise(first, (size_t)(huge - first), MADV_COLLAPSE);
    for (; at < end; at += page)
        touch_page(base + at);
}

static size_t in_pages(size_t bytes)
{
    size_t page = page_bytes();

    return bytes <= SIZE_MAX - page ? mt_round_up(bytes, page) : SIZE_MAX;
}

static mt_status no_memory(const char *what, size_t bytes, size_t mapped)
{
    return MT_FAIL(MT_ENOMEM, "%s: %zu bytes (%.1f MiB) of host memory could not be mapped with "
                   "%zu (%.1f MiB) mapped already; raise the process's memory limit or keep less "
                   "on the host", what, bytes, mib(bytes), mapped, mib(mapped));
}

/* r NULL: anonymous memory. */
static mt_status map_reserved(mt_arena *a, size_t bytes, int flags, const mt_range *r, int own,
                              const char *what, size_t mapped)
{
    size_t   page = page_bytes(), whole = in_pages(bytes);
    int      huge = whole >= 2 * HUGE_BYTES && HUGE_BYTES % page == 0;
    mt_arena made = { .base = nothing, .reserved = 1, .shared = r != NULL };

    MT_ASSERT(r == NULL || r->bytes == bytes);
    if (bytes > 0) {
        made.base = whole < SIZE_MAX ? map_aligned(whole, huge ? HUGE_BYTES : page, flags)
                                     : MAP_FAILED;
        if (made.base == MAP_FAILED)
            return no_memory(what, bytes, mapped);
        if (r != NULL && mt_share_map(r, made.base, own) != 0) {
            (void)munmap(made.base, whole);
            return no_memory(what, bytes, mapped);
        }
        made.bytes = made.kept = whole;
        made.n_alone = whole;
        mt_forks_private(made.base, whole);
        if (!own)
            place(made.base, whole, 0);
        if (huge)
            (void)madvise(made.base, whole, MADV_HUGEPAGE);
    }
    *a = made;
    return MT_OK;
}

/* Most of its pages are never made, so the kernel need not promise them. */
mt_status mt_arena_reserve(mt_arena *a, size_t bytes, const mt_range *r, int own, const char *what,
                           size_t mapped)
{
    return map_reserved(a, bytes, MAP_NORESERVE, r, own, what, mapped);
}

void mt_arena_part(mt_arena *a, const mt_arena *whole, size_t from, size_t bytes)
{
    size_t room = in_pages(bytes);

    MT_ASSERT(from % page_bytes() == 0 && from + room <= whole->bytes);
    *a = (mt_arena){ .base = (char *)whole->base + from, .bytes = room, .kept = room,
                     .reserved = 1, .part = 1, .shared = whole->shared, .n_alone = room };
}

void mt_arena_keep(mt_arena *a, size_t from, size_t bytes)
{
    size_t page = page_bytes(), begin = in_pages(from), end = (from + bytes) / page * page;

    a->from = from / page * page;
    a->kept = bytes > 0 ? in_pages(from + bytes) - a->from : 0;
    a->alone = begin;
    a->n_alone = end > begin ? end - begin : 0;
    if (a->shared && a->n_alone > 0 && a->kept < a->bytes)      /* the rest is others' */
        place((char *)a->base + a->alone, a->n_alone, 1);
}

mt_status mt_arena_register(mt_arena *a, mt_dev *dev)
{
    mt_status st;

    if (a->dev != NULL || a->kept == 0)
        return MT_OK;
    if ((st = dev->ops->host_register(dev, first_of(a), a->kept)) == MT_OK)
        a->dev = dev;
    return st;
}

mt_status mt_arena_commit(mt_arena *a, mt_pool *pool, mt_dev *dev)
{
    int64_t n = (int64_t)((a->kept + CHUNK_BYTES - 1) / CHUNK_BYTES);

    if (!a->reserved)
        return MT_OK;
    mt_pool_run(n > 1 ? pool : NULL, touch_chunk, a, n);     /* one chunk need not take turns */
    if (dev != NULL)
        MT_DO(mt_arena_register(a, dev));
    a->reserved = 0;
    return MT_OK;
}

void mt_arena_unregister(mt_arena *a)
{
    if (a->dev != NULL)
        a->dev->ops->host_unregister(a->dev, first_of(a));
    a->dev = NULL;
}

/* The addresses stay; from them zeros are read until they are written. */
void mt_arena_decommit(mt_arena *a)
{
    mt_arena_unregister(a);
    if (a->shared && a->n_alone > 0)
        (void)madvise((char *)a->base + a->alone, a->n_alone, MADV_REMOVE);
    else if (!a->shared && a->bytes > 0)
        (void)madvise(a->base, a->bytes, MADV_DONTNEED);
    a->reserved = 1;
}

mt_status mt_arena_open(mt_arena *a, size_t bytes, mt_pool *pool, mt_dev *dev,
                        const char *what, size_t mapped)
{
    mt_arena  made __attribute__((cleanup(mt_arena_close))) = { 0 };

    MT_DO(map_reserved(&made, bytes, 0, NULL, 0, what, mapped));
    MT_DO(mt_arena_commit(&made, pool, dev));
    *a = made;
    made = (mt_arena){ 0 };
    return MT_OK;
}

/* Addresses below the memory's are only counted from: base may be one of them. */
mt_status mt_arena_device(mt_arena *a, size_t from, size_t bytes, mt_dev *dev, const char *what)
{
    mt_arena  made = { .base = nothing, .on_device = 1 };
    void     *mem;
    mt_status st;

    if (bytes > 0) {
        st = dev->ops->mem_alloc(dev, bytes, &mem);
        if (st == MT_EDEVMEM)
            return MT_FAIL(st, "%s: no %zu bytes (%.1f MiB) of device memory; let fewer units live "
                           "there", what, bytes, mib(bytes));
        MT_DO(st);
        made.base = (void *)((uintptr_t)mem - from);
        made.from = from;
        made.bytes = made.kept = bytes;
        made.dev = dev;
    }
    *a = made;
    return MT_OK;
}

void mt_arena_close(mt_arena *a)
{
    if (a->on_device && a->dev != NULL)
        a->dev->ops->mem_free(a->dev, (void *)((uintptr_t)a->base + a->from));
    if (!a->on_device)
        mt_arena_unregister(a);
    if (!a->on_device && a->bytes > 0 && !a->part) {
        mt_forks_shared(a->base);
        munmap(a->base, a->bytes);
    }
    memset(a, 0, sizeof *a);
}
