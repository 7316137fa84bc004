/* keeping.h — what the tests of swap and spill share: windows that keep two tensors, and compute
 * that makes them and later looks at what came back.
 *
 * Threads: run from the one that computes; `wrong` is counted in the queue.
 */
#ifndef MT_KEEPING_H
#define MT_KEEPING_H

#include "toy.h"
#include "../../csrc/core/swap.h"
#include "../../csrc/io/file.h"

#define PARTS   2
#define LONGEST 4000                     /* elements */

static const int length[PARTS] = { LONGEST, 7 };

typedef struct tensors {
    float at[PARTS][LONGEST];
} tensors;

typedef struct scene {
    toy         t;
    char        dir[64];                 /* these two: of bundles that are kept in a file */
    mt_file    *file;
    mt_swap    *w;
    tensors     source[2], landing[2];   /* taken in turn: memory that torch's allocator gives
                                          * again */
    atomic_long wrong;                   /* elements that are not what was made */
    int         slow;                    /* to look at what came back takes longer than copies */
} scene;

typedef struct keeper_act {
    scene   *s;
    tensors *on;
    float    value;
    int      look;
} keeper_act;

static inline void keeper_perform(void *arg)
{
    FREED keeper_act *a = arg;

    if (a->look && a->s->slow)
        sleep_ms(2);
    for (int p = 0; p < PARTS; p++)
        for (int i = 0; i < length[p]; i++) {
            float value = a->value + (float)p + (float)(i % 13);

            if (a->look)
                atomic_fetch_add(&a->s->wrong, a->on->at[p][i] != value);
            else
                a->on->at[p][i] = value;
        }
}

/* Makes a window's tensors, or looks at them, in the order of the toy's run. */
static inline void run(scene *s, tensors *on, float value, int look)
{
    keeper_act *a = malloc(sizeof *a);

    REQUIRE(a != NULL);
    *a = (keeper_act){ s, on, value, look };
    CHECK_OK(s->t.dev->ops->call(s->t.run, keeper_perform, a));
}

static inline mt_swap_part *parts(tensors *on, mt_swap_part *p)
{
    for (int i = 0; i < PARTS; i++)
        p[i] = (mt_swap_part){ on->at[i], (size_t)length[i] * sizeof(float) };
    return p;
}

static inline float value_of(int step, int w)
{
    return (float)(1000 * step + 50 * w);
}

static inline long scene_end(scene *s)
{
    CHECK_OK(s->t.dev->ops->sync(s->t.run));
    mt_swap_close(s->w);
    if (s->file != NULL) {
        mt_file_close(s->file);
        CHECK_EQ(rmdir(s->dir), 0);      /* nothing is left there */
    }
    toy_close(&s->t);
    return atomic_load(&s->wrong);
}

static inline void scene_close(scene *s)
{
    CHECK_EQ(scene_end(s), 0);
}

#define SCENE(s, ...) CLOSED_BY(scene_close) scene s; scene_open(&s, __VA_ARGS__)

#endif
