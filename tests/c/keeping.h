/* keeping.h — what the tests of swap and spill share: windows that keep two tensors, and compute
 * that makes them and later looks at what came back.
 *
 * Threads: keeper_run from the one that computes; `wrong` is counted in the queue.
 */
#ifndef MT_KEEPING_H
#define MT_KEEPING_H

#include "toy.h"
#include "../../csrc/core/swap.h"

#define PARTS   2
#define LONGEST 4000                     /* elements */

static const int length[PARTS] = { LONGEST, 7 };

typedef struct tensors {
    float at[PARTS][LONGEST];
} tensors;

typedef struct keeper {
    tensors     source[2], landing[2];   /* taken in turn: memory that torch's allocator gives
                                          * again */
    atomic_long wrong;                   /* elements that are not what was made */
    int         slow;                    /* to look at what came back takes longer than copies */
} keeper;

typedef struct keeper_act {
    keeper  *k;
    tensors *on;
    float    value;
    int      look;
} keeper_act;

static inline void keeper_perform(void *arg)
{
    FREED keeper_act *a = arg;

    if (a->look && a->k->slow)
        sleep_ms(2);
    for (int p = 0; p < PARTS; p++)
        for (int i = 0; i < length[p]; i++) {
            float value = a->value + (float)p + (float)(i % 13);

            if (a->look)
                atomic_fetch_add(&a->k->wrong, a->on->at[p][i] != value);
            else
                a->on->at[p][i] = value;
        }
}

/* Makes a window's tensors, or looks at them, in the order of t's run. */
static inline void keeper_run(keeper *k, const toy *t, tensors *on, float value, int look)
{
    keeper_act *a = malloc(sizeof *a);

    REQUIRE(a != NULL);
    *a = (keeper_act){ k, on, value, look };
    CHECK_OK(t->dev->ops->call(t->run, keeper_perform, a));
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

#endif
