/* test_file.c — the scratch file: what comes back, what is told when it does not,
 * and what is left behind. */
#include "check.h"
#include "../../csrc/io/file.h"
#include "../../csrc/io/sum.h"

#define PAGE  MT_BLOCK_ALIGN
#define BLOCK MT_BLOCK_BYTES

/* ---- a directory of its own, and requests that are waited for ---------------------------- */

static char here[128];

static void enter(void)
{
    const char *tmp = getenv("TMPDIR");

    snprintf(here, sizeof here, "%s/mt_test_file.XXXXXX", tmp != NULL ? tmp : "/tmp");
    REQUIRE(mkdtemp(here) != NULL);
}

static int entries(void)
{
    DIR *d = opendir(here);
    int  n = -2;                 /* . and .. */

    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

static void leave(void)
{
    CHECK_EQ(entries(), 0);
    CHECK_EQ(rmdir(here), 0);
}

#define FILE_TEST(name) TEST_BETWEEN(name, enter(), leave())

typedef struct moved {
    mt_request      r;
    pthread_mutex_t mu;
    pthread_cond_t  came;
    int             over;        /* mu */
} moved;

static void tell(mt_request *r)
{
    moved *m = r->arg;

    pthread_mutex_lock(&m->mu);
    m->over++;
    pthread_cond_signal(&m->came);
    pthread_mutex_unlock(&m->mu);
}

static void begin(mt_file *f, moved *m, int write, uint64_t at, void *mem, size_t bytes,
                  uint64_t *sums)
{
    mt_blocks *b = mt_file_blocks(f);

    *m = (moved){ .r = { .write = write, .at = at, .mem = mem, .bytes = bytes, .sums = sums,
                         .done = tell, .arg = m } };
    pthread_mutex_init(&m->mu, NULL);
    pthread_cond_init(&m->came, NULL);
    b->ops->put(b, &m->r);
}

static mt_status end(moved *m)
{
    pthread_mutex_lock(&m->mu);
    while (m->over == 0)
        pthread_cond_wait(&m->came, &m->mu);
    pthread_mutex_unlock(&m->mu);
    CHECK_EQ(m->over, 1);
    pthread_cond_destroy(&m->came);
    pthread_mutex_destroy(&m->mu);
    return m->r.st;
}

static mt_status now(mt_file *f, moved *m, int write, uint64_t at, void *mem, size_t bytes,
                     uint64_t *sums)
{
    begin(f, m, write, at, mem, bytes, sums);
    return end(m);
}

static char *memory(size_t bytes)
{
    void *p;

    REQUIRE(posix_memalign(&p, PAGE, bytes) == 0);
    memset(p, 0xAB, bytes);
    return p;
}

static void fill(char *p, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = (i + 1) * 0x9e3779b97f4a7c15u + seed;

        memcpy(p + i, &word, sizeof word);
    }
}

/* ---- calls that fail --------------------------------------------------------------------- */

typedef enum wrong {
    NOTHING, SHORT, AGAIN, BROKEN, ENDED, REFUSED, NO_SPACE, SOFT, LATE, SIGNALS, HELD
} wrong;
static struct {
    wrong      what;
    atomic_int left;             /* calls until it happens */
    atomic_int seen;
} fault;

static int strikes(wrong a)
{
    return fault.what == a && atomic_fetch_sub(&fault.left, 1) <= 0 &&
           atomic_fetch_add(&fault.seen, 1) >= 0;
}

static ssize_t faulty(ssize_t (*call)(int, char *, size_t, off_t), int fd, char *p, size_t bytes,
                      off_t at)
{
    if (strikes(AGAIN) && atomic_load(&fault.seen) % 2) {
        errno = EINTR;
        return -1;
    }
    if (strikes(BROKEN)) {
        errno = EIO;
        return -1;
    }
    if (strikes(ENDED))
        return 0;
    if (strikes(SHORT) && bytes > 2 * PAGE)
        bytes = PAGE + 100;      /* and not a whole number of pages is counted */
    return call(fd, p, bytes, at);
}

static ssize_t real_read(int fd, char *p, size_t bytes, off_t at)
{
    return pread(fd, p, bytes, at);
}

static ssize_t real_write(int fd, char *p, size_t bytes, off_t at)
{
    return pwrite(fd, p, bytes, at);
}

static ssize_t read_faulty(int fd, void *p, size_t bytes, off_t at)
{
    if (fault.what == LATE && (fcntl(fd, F_GETFL) & O_DIRECT)) {
        errno = EINVAL;
        return -1;
    }
    return faulty(real_read, fd, p, bytes, at);
}

static ssize_t write_faulty(int fd, const void *p, size_t bytes, off_t at)
{
    return faulty(real_write, fd, (char *)(uintptr_t)p, bytes, at);
}

static int allocate_faulty(int fd, off_t at, off_t bytes)
{
    if (fault.what == SIGNALS && atomic_fetch_sub(&fault.left, 1) > 0)
        return EINTR;
    while (fault.what == HELD && bytes > (off_t)PAGE && atomic_load(&fault.left) > 0) {
        atomic_fetch_add(&fault.seen, 1);
        sleep_ms(1);
    }
    return strikes(NO_SPACE) ? ENOSPC : posix_fallocate(fd, at, bytes);
}

static int direct_faulty(int fd, int on)
{
    int flags = fcntl(fd, F_GETFL);

    if (fault.what == SOFT)
        return EINVAL;
    if (fault.what == SHORT)     /* pieces of pages are written: not directly */
        on = 0;
    return fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 ? 0 : errno;
}

static const mt_file_calls faulty_calls = { read_faulty, write_faulty, allocate_faulty,
                                            direct_faulty };

static mt_file *opened(wrong what, int left, uint64_t limit)
{
    mt_file *f = NULL;

    fault.what = what;
    atomic_store(&fault.left, left);
    atomic_store(&fault.seen, 0);
    REQUIRE_OK(mt_file_open(here, limit, 4, &faulty_calls, &f));
    return f;
}

CLOSES(mt_file, mt_file_close(*x))
#define OPENED_FILE(f, ...) CLOSED_BY(mt_file_done) mt_file *f = opened(__VA_ARGS__)

/* ---- tests ------------------------------------------------------------------------------- */

TEST(a_changed_byte_changes_the_sum)
{
    static const size_t sizes[] = { 1, 8, 63, 64, 65, 200 };
    unsigned char       p[208];

    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        fill((char *)p, sizeof p, 1);
        uint64_t sum = mt_block_sum(p, sizes[s]);
        CHECK(sum != 0 && sum == mt_block_sum(p, sizes[s]));
        CHECK(sum != mt_block_sum(p, sizes[s] - 1));
        for (size_t i = 0; i < sizes[s]; i++)
            for (int bit = 0; bit < 8; bit++) {
                p[i] ^= (unsigned char)(1 << bit);
                CHECK(mt_block_sum(p, sizes[s]) != sum);
                p[i] ^= (unsigned char)(1 << bit);
            }
    }
    memset(p, 0, sizeof p);
    p[7] = p[71] = 0x80;                                 /* the top bits of one lane's two words */
    CHECK(mt_block_sum(p, 128) != mt_block_sum(p + 136, 64));
    memset(p, 0, sizeof p);
    p[0] = 1;
    CHECK(mt_block_sum(p, 128) != mt_block_sum(p + 8, 128));
}

#define REQUESTS 6
TEST(requests_come_back_as_they_were_written)
{
    static const size_t bytes[REQUESTS] = { PAGE, BLOCK, BLOCK + PAGE, 2 * BLOCK, 2 * BLOCK - PAGE,
                                            3 * PAGE };
    static const wrong  ways[] = { NOTHING, SHORT, AGAIN, SOFT, LATE };
    uint64_t            sums[REQUESTS][3], at[REQUESTS];
    moved               m[REQUESTS];
    char               *out[REQUESTS], *back[REQUESTS];

    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
        enter();
        mt_file *f = opened(ways[w], 3, 0);
        CHECK(ways[w] != SOFT || !mt_file_stats_get(f).direct);
        CHECK(ways[w] != LATE || !mt_file_stats_get(f).direct);
        CHECK_OK(mt_file_reserve(f, 4 * BLOCK));         /* less than is taken */
        for (int i = 0; i < REQUESTS; i++) {
            out[i] = memory(bytes[i]);
            back[i] = memory(bytes[i]);
            fill(out[i], bytes[i], (unsigned)i);
            memset(sums[i], 0, sizeof sums[i]);
            CHECK_OK(mt_file_blocks(f)->ops->take(mt_file_blocks(f), bytes[i] - 1, &at[i]));
            CHECK_EQ(at[i] % PAGE, 0);
            begin(f, &m[i], 1, at[i], out[i], bytes[i], sums[i]);
        }
        for (int i = 0; i < REQUESTS; i++)
            CHECK_OK(end(&m[i]));
        for (int i = 0; i < REQUESTS; i++)
            begin(f, &m[i], 0, at[i], back[i], bytes[i], sums[i]);
        for (int i = 0; i < REQUESTS; i++) {
            CHECK_OK(end(&m[i]));
            CHECK(memcmp(out[i], back[i], bytes[i]) == 0);
            free(out[i]);
            free(back[i]);
        }
        CHECK((ways[w] != SHORT && ways[w] != AGAIN) || atomic_load(&fault.seen) > 0);
        CHECK_EQ(mt_file_stats_get(f).read_bytes, mt_file_stats_get(f).written_bytes);
        mt_file_close(f);
        leave();
    }
}

FILE_TEST(what_was_never_written_is_zero_and_not_read)
{
    uint64_t sums[2] = { 0, 0 }, at;
    moved    m;

    FREED char *p = memory(2 * BLOCK);
    OPENED_FILE(f, NOTHING, 0, 0);
    CHECK_OK(mt_file_blocks(f)->ops->take(mt_file_blocks(f), 2 * BLOCK, &at));
    CHECK_OK(now(f, &m, 1, at, p, BLOCK, sums));
    CHECK_OK(now(f, &m, 0, at, p, 2 * BLOCK, sums));
    CHECK_EQ((unsigned char)p[BLOCK - 1], 0xAB);
    CHECK_EQ(p[BLOCK], 0);
    CHECK_EQ(p[2 * BLOCK - 1], 0);
    CHECK_EQ(mt_file_stats_get(f).read_bytes, BLOCK);
}

FILE_TEST(a_flipped_byte_and_a_cut_file_are_told_by_path_and_offset)
{
    uint64_t sums[3] = { 0 }, at;
    moved    m;
    char     bad = 0x55;

    FREED char *p = memory(3 * BLOCK);
    OPENED_FILE(f, SOFT, 0, 0);                     /* through the page cache, as the change is */
    CHECK_OK(mt_file_blocks(f)->ops->take(mt_file_blocks(f), 3 * BLOCK, &at));
    CHECK_OK(now(f, &m, 1, at, p, 3 * BLOCK, sums));
    int fd = open(scratch_of(here), O_RDWR);
    REQUIRE(fd >= 0);
    CHECK_EQ(pwrite(fd, &bad, 1, (off_t)(at + BLOCK + 77)), 1);
    CHECK_EQ(now(f, &m, 0, at, p, 3 * BLOCK, sums), MT_EDISK);
    CHECK_EQ(m.r.bad_at, at + BLOCK);
    CHECK_HAS(m.r.text, here);
    CHECK_HAS(m.r.text, "offset 4194304 are not those");
    CHECK_EQ(ftruncate(fd, (off_t)(at + 2 * BLOCK + PAGE)), 0);
    CHECK_EQ(now(f, &m, 0, at + 2 * BLOCK, p, BLOCK, &sums[2]), MT_EDISK);
    CHECK_HAS(m.r.text, "offset 8388608: the file ends");
    close(fd);
}

/* Whatever call it is: the request says so, the file goes on, and others are not harmed. */
TEST(the_nth_failing_transfer_is_told)
{
    for (int write = 0; write < 2; write++)
        for (int n = 0; n < 3; n++) {
            uint64_t sums[2] = { 0 }, at;
            moved    m;

            enter();
            char *p = memory(2 * BLOCK);
            mt_file *f = opened(NOTHING, 0, 0);
            CHECK_OK(mt_file_blocks(f)->ops->take(mt_file_blocks(f), 2 * BLOCK, &at));
            CHECK_OK(now(f, &m, 1, at, p, 2 * BLOCK, sums));
            fault.what = n == 2 && !write ? ENDED : BROKEN;
            atomic_store(&fault.left, n % 2);
            CHECK_EQ(now(f, &m, write, at, p, 2 * BLOCK, sums), MT_EDISK);
            CHECK_HAS(m.r.text, write ? "writing" : "reading");
            CHECK_HAS(m.r.text, fault.what == ENDED ? "the file ends" : strerror(EIO));
            fault.what = NOTHING;
            CHECK_OK(now(f, &m, 1, at, p, 2 * BLOCK, sums));
            CHECK_OK(now(f, &m, 0, at, p, 2 * BLOCK, sums));
            mt_file_close(f);
            free(p);
            leave();
        }
}

FILE_TEST(a_full_disk_is_known_before_and_a_limit_holds)
{
    uint64_t at;

    mt_file *f = opened(NO_SPACE, 1, 0);     /* the first is the page that direct is tried on */
    CHECK_FAILS(mt_file_reserve(f, 8 * BLOCK), MT_EDISK, here);
    CHECK_SAYS(strerror(ENOSPC));
    CHECK_SAYS("are free");
    CHECK_EQ(mt_file_blocks(f)->ops->take(mt_file_blocks(f), 8 * BLOCK, &at), MT_EDISK);
    mt_file_close(f);
    f = opened(NOTHING, 0, 2 * BLOCK);
    CHECK_OK(mt_file_blocks(f)->ops->take(mt_file_blocks(f), 2 * BLOCK, &at));
    CHECK_EQ(mt_file_blocks(f)->ops->take(mt_file_blocks(f), 1, &at), MT_EDISK);
    CHECK_SAYS("the limit is 8388608");
    mt_file_close(f);
    CHECK_FAILS(mt_file_open("/nonexistent/path", 0, 1, NULL, &f), MT_EDISK, "/nonexistent/path");
    CHECK_EQ(mt_file_open("", 0, 1, NULL, &f), MT_EINVAL);
}

FILE_TEST(a_signal_does_not_end_the_search_for_room)
{
    OPENED_FILE(f, SIGNALS, 3, 0);
    atomic_store(&fault.left, 5);
    CHECK_OK(mt_file_reserve(f, 2 * BLOCK));
    CHECK(atomic_load(&fault.left) < 0);
    CHECK_EQ(mt_file_stats_get(f).bytes, 2 * BLOCK);
}

static void *reserves(void *f)
{
    CHECK_OK(mt_file_reserve(f, 2 * BLOCK));
    return NULL;
}

/* Room for terabytes takes a disk its time: for who reads and writes what is there, and for who
 * only looks, it does not. */
FILE_TEST(while_room_is_looked_for_the_file_is_used)
{
    FREED char *p = memory(PAGE);
    uint64_t sum = 0, at;
    moved    m;

    OPENED_FILE(f, HELD, 0, 0);
    CHECK_OK(mt_file_blocks(f)->ops->take(mt_file_blocks(f), PAGE, &at));
    atomic_store(&fault.left, 1);
    pthread_t thread = thread_start(reserves, f);
    UNTIL(atomic_load(&fault.seen) != 0);
    CHECK(mt_file_stats_get(f).bytes < 2 * BLOCK);
    CHECK_OK(now(f, &m, 1, at, p, PAGE, &sum));
    CHECK_OK(now(f, &m, 0, at, p, PAGE, &sum));
    atomic_store(&fault.left, 0);
    thread_join(thread);
    CHECK_EQ(mt_file_stats_get(f).bytes, 2 * BLOCK);
}

typedef struct looker {
    mt_file   *f;
    atomic_int stop;
} looker;

static void *looks(void *arg)
{
    looker *l = arg;

    while (!atomic_load(&l->stop))
        (void)mt_file_stats_get(l->f);
    return NULL;
}

/* Whatever lock another thread had at that moment: it is not there to let go of it. */
FILE_TEST(children_of_any_moment_end_and_have_no_descriptor)
{
    looker l = { 0 };

    l.f = opened(NOTHING, 0, 0);
    CHECK(scratch_of(here) != NULL);
    pthread_t thread = thread_start(looks, &l);
    for (int i = 0; i < 40; i++) {
        int   status = 1;
        pid_t pid = fork();

        if (pid == 0) {
            alarm(20);
            mt_file_close(l.f);
            _exit(scratch_of(here) != NULL);
        }
        REQUIRE(waitpid(pid, &status, 0) == pid);
        CHECK_EQ(status, 0);
    }
    atomic_store(&l.stop, 1);
    thread_join(thread);
    CHECK(scratch_of(here) != NULL);
    mt_file_close(l.f);
}
