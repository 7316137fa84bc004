/* test_cuda.c — what dev_cuda.c owes torch, with which it shares threads and a context.
 *
 * The rest of what it must do is in test_dev.c, where every device is asked.
 */
#include "check.h"

#ifdef MT_WITH_CUDA
#include "../../csrc/ops/sumsq.h"
#include <cuda.h>
#include <cuda_runtime_api.h>

static mt_dev *cuda_open(int index)
{
    mt_dev *d = NULL;

    return mt_dev_cuda_open(index, &d) == MT_OK ? d : NULL;
}

static void use(mt_dev *d)
{
    const mt_dev_ops *o = d->ops;
    mt_queue         *q;
    mt_event         *e;
    void             *mem;
    int               done;

    REQUIRE_OK(o->mem_alloc(d, 4096, &mem));
    REQUIRE_OK(o->queue_open(d, "q", &q));
    REQUIRE_OK(o->event_open(d, &e));
    CHECK_OK(o->copy(q, mem, &done, sizeof done));
    CHECK_OK(o->record(q, e));
    CHECK_OK(o->wait(q, e));
    CHECK_OK(o->query(e, &done));
    CHECK_OK(o->sync_event(e));
    CHECK_OK(o->sync(q));
    o->event_close(e);
    o->queue_close(q);
    o->mem_free(d, mem);
}

static int current_device(void)
{
    int index = -1;

    CHECK_EQ(cudaGetDevice(&index), cudaSuccess);
    return index;
}

/* Is there a context on device 0? */
static int device_0_in_use(void)
{
    CUresult (*get_state)(CUdevice, unsigned *, int *) = NULL;
    enum cudaDriverEntryPointQueryResult found;
    void    *p = NULL;
    unsigned flags;
    int      active = -1;

    REQUIRE(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &p, 12000,
                                             cudaEnableDefault, &found) == cudaSuccess);
    memcpy(&get_state, &p, sizeof p);
    CHECK_EQ(get_state(0, &flags, &active), CUDA_SUCCESS);
    return active;
}

static void *use_afresh(void *d)
{
    CHECK_EQ(current_device(), 0);
    use(d);
    CHECK_EQ(current_device(), 0);
    return NULL;
}

/* First in the program: nothing has touched device 0 yet, and using device 1 must not. */
TEST(device_1_needs_nothing_of_device_0)
{
    mt_dev *d = cuda_open(1);

    if (d == NULL)
        SKIP("%s", mt_last_error());
    pthread_t thread = thread_start(use_afresh, d);
    thread_join(thread);
    use(d);
    CHECK_EQ(device_0_in_use(), 0);
    d->ops->close(d);
}

TEST(the_threads_device_is_left_alone)
{
    mt_dev *d = cuda_open(1);

    if (d == NULL)
        SKIP("%s", mt_last_error());
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(cudaSetDevice(i), cudaSuccess);
        use(d);
        CHECK_EQ(current_device(), i);
    }
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    d->ops->close(d);
}

/* A refused call must not be found by torch at its next launch. */
TEST(a_failure_leaves_no_error_behind)
{
    mt_dev   *d = cuda_open(0);
    mt_queue *q;
    mt_event *e;
    void     *p = NULL;
    int       done;

    if (d == NULL)
        SKIP("%s", mt_last_error());
    CHECK_EQ(d->ops->mem_alloc(d, SIZE_MAX - 100, &p), MT_EDEVMEM);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    d->ops->host_unregister(d, d);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    CHECK_EQ(d->ops->host_register(d, d, SIZE_MAX / 2) == MT_OK, 0);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    REQUIRE_OK(d->ops->queue_open(d, "q", &q));
    REQUIRE_OK(d->ops->event_open(d, &e));
    for (int i = 0; i < 100; i++) {
        CHECK_OK(d->ops->record(q, e));
        CHECK_OK(d->ops->query(e, &done));
    }
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    d->ops->event_close(e);
    d->ops->queue_close(q);
    use(d);
    d->ops->close(d);
}

/* Up from p and down again into it, by a queue of d. */
static void there_and_back(mt_dev *d, unsigned char *p, size_t bytes)
{
    mt_queue *q;
    void     *mem;
    size_t    wrong = 0;

    for (size_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)(i * 7 >> 5);
    REQUIRE_OK(d->ops->mem_alloc(d, bytes, &mem));
    REQUIRE_OK(d->ops->queue_open(d, "q", &q));
    CHECK_OK(d->ops->copy(q, mem, p, bytes));
    CHECK_OK(d->ops->sync(q));
    memset(p, 0, bytes);
    CHECK_OK(d->ops->copy(q, p, mem, bytes));
    CHECK_OK(d->ops->sync(q));
    for (size_t i = 0; i < bytes; i++)
        wrong += p[i] != (unsigned char)(i * 7 >> 5);
    CHECK_EQ(wrong, 0);
    d->ops->queue_close(q);
    d->ops->mem_free(d, mem);
}

/* Pages that nobody may touch cannot be locked: the driver itself refuses. */
TEST(what_the_driver_refuses_to_lock_is_copied_all_the_same)
{
    const size_t bytes = (size_t)20 << 20;
    mt_dev      *d = cuda_open(0);
    char         why[512];

    if (d == NULL)
        SKIP("%s", mt_last_error());
    REQUIRE_OK(mt_dev_stage_open(d, &d));
    unsigned char *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(p != MAP_FAILED);
    CHECK_OK(d->ops->host_register(d, p, bytes));
    CHECK_EQ(mt_dev_stage_noted(d, why, sizeof why), bytes);
    CHECK_HAS(why, "cannot be locked");
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    REQUIRE(mprotect(p, bytes, PROT_READ | PROT_WRITE) == 0);
    there_and_back(d, p, bytes);
    d->ops->host_unregister(d, p);
    CHECK_OK(d->ops->host_register(d, p, bytes));
    CHECK_EQ(mt_dev_stage_noted(d, why, sizeof why), 0);
    there_and_back(d, p, bytes);
    d->ops->host_unregister(d, p);
    munmap(p, bytes);
    d->ops->close(d);
}

/* Last in the program: the context is gone afterwards, for every user of it. */
TEST(a_lost_device_says_why_again_and_again)
{
    mt_dev   *d = cuda_open(0);
    mt_sumsq *s = NULL;
    mt_queue *q;
    mt_event *e;
    void     *p = NULL;
    double   *out;
    char      first[1024];

    if (d == NULL)
        SKIP("%s", mt_last_error());
    REQUIRE((out = aligned_alloc(4096, 4096)) != NULL);
    REQUIRE_OK(d->ops->host_register(d, out, 4096));
    REQUIRE_OK(d->ops->queue_open(d, "q", &q));
    REQUIRE_OK(d->ops->event_open(d, &e));
    REQUIRE_OK(mt_sumsq_open(d, &s));
    CHECK_OK(mt_sumsq_put(s, q, MT_F32, (void *)4096, 100000, out, NULL));     /* not our memory */
    CHECK_EQ(d->ops->sync(q), MT_EDEVICE);
    (void)snprintf(first, sizeof first, "%s", mt_last_error());
    CHECK_HAS(first, "cuda:0: cudaStreamSynchronize: an illegal memory access");
    CHECK_EQ(d->ops->record(q, e), MT_EDEVICE);
    CHECK_STR(mt_last_error(), first);
    CHECK_EQ(d->ops->mem_alloc(d, 64, &p), MT_EDEVICE);
    CHECK_STR(mt_last_error(), first);
    mt_sumsq_close(s);
    d->ops->event_close(e);
    d->ops->queue_close(q);
    d->ops->host_unregister(d, out);
    d->ops->close(d);
    free(out);
}

#else

TEST(needs_a_build_with_cuda)
{
    SKIP("this build has no CUDA device");
}

#endif
