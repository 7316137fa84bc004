/* homes.c — where units may be at home, before anything is timed: homes as search.h has them. */
#include "search.h"

#include <string.h>

/* Units in RAM, those that are used last first: their updates have most time before the next
 * forward needs them. Where updates follow gradients that are kept nowhere, any first few are
 * spread over the model (van der Corput's sequence): the drive has the time between them, and a
 * backward waits for each. Returns how many. */
static int64_t last_used(const mt_placing *in, const uint8_t *homes, int64_t *out)
{
    int64_t *order = in->keeps ? out : out + in->n_order, n = 0, made = 0;
    int      bits = 0;

    for (int64_t i = in->n_order; i > 0; i--)
        if (homes[in->order[i - 1]] == MT_HOME_RAM)
            order[n++] = in->order[i - 1];
    if (in->keeps)
        return n;
    while (n >> bits > 0)
        bits++;
    for (int64_t i = 0; i < (int64_t)1 << bits; i++) {
        int64_t at = 0;

        for (int bit = 0; bit < bits; bit++)
            at |= (i >> bit & 1) << (bits - 1 - bit);
        if (at < n)
            out[made++] = order[at];
    }
    return made;
}

/* The same homes with as many units' states, then weights, on disk as host memory cannot hold.
 * over: bytes that it lacks. */
static void to_disk(const mt_placing *in, const uint8_t *homes, int64_t over, uint8_t *out,
                    int64_t *order)
{
    const int64_t *files = in->files, *whole = in->files + in->n_units;
    int64_t        room = in->room, n, i;
    int            forced = in->to_disk != MT_HOME_RAM, some = 0;  /* what is asked for: anything */

    memcpy(out, homes, (size_t)in->n_units);
    if (forced)
        over = 1;
    if (room < 0 || over <= 0)
        return;
    n = last_used(in, homes, order);
    for (i = 0; i < n; i++) {
        int64_t u = order[i], planes = files[u] - in->padding[u];

        /* Buffers of the disk take host memory as soon as one unit is there. */
        if (over + (some ? in->memory : 0) <= 0 || files[u] > room)
            break;
        if (planes == 0)
            continue;
        out[u] = MT_HOME_DISK;
        some = 1;
        room -= files[u];
        over -= forced ? 0 : planes;
    }
    if (in->to_disk == MT_HOME_DISK || in->apart ||
        (!forced && over + (some ? in->memory : 0) <= 0))
        return;
    over += forced ? 0 : in->memory + in->feed;
    for (i = 0; i < n; i++) {
        int64_t u = order[i], more = whole[u] - (out[u] == MT_HOME_DISK ? files[u] : 0);

        if (over <= 0 || more > room || (out[u] != MT_HOME_DISK && in->trained[u] > 0))
            return;
        out[u] = MT_HOME_DISK_WEIGHTS;
        room -= more;
        over -= forced ? 0 : in->weights[u];
    }
}

/* Units in RAM whose updates are over sooner through the device than behind the others on the
 * host go that way. Returns how many. */
static int64_t to_device(const mt_placing *in, const uint8_t *homes, uint8_t *out)
{
    double  device_s, host_s = 0.0;
    int64_t n = 0, visiting = 0;

    memcpy(out, homes, (size_t)in->n_units);
    for (int64_t u = 0; u < in->n_units; u++)
        visiting += homes[u] == MT_HOME_ARRIVE ? in->states[u] : 0;
    device_s = (double)(2 * visiting) / in->both;   /* they take the same way, and come first */
    for (int64_t i = 0; i < in->n_order && in->through != MT_THROUGH_NONE; i++) {
        int64_t u = in->order[i];
        double  there, here;

        if (homes[u] != MT_HOME_RAM || in->trained[u] == 0)
            continue;
        there = device_s + (double)in->trained[u] / in->through_rate;
        here = host_s + (double)in->trained[u] / in->host_rate;
        if (in->through != MT_THROUGH_ALL && there >= here) {
            host_s = here;
            continue;
        }
        device_s = there;
        out[u] = MT_HOME_THROUGH;
        n++;
    }
    return n;
}

int64_t mt_search_homes(const mt_placing *in, uint8_t *homes, uint8_t *several, int64_t *scratch)
{
    size_t   units = (size_t)in->n_units;
    uint8_t *placed = (uint8_t *)(scratch + 2 * in->n_order), *by_device = placed + 2 * units;
    int64_t  made = 0;

    for (int64_t at = 0; at < in->n_base; at++) {
        const uint8_t *base = in->base + (size_t)at * units;
        int64_t        n = to_device(in, base, by_device);

        for (int64_t i = 0; i < in->n_several; i++)
            to_disk(in, base, in->lack[at * in->n_several + i], placed + (size_t)i * units,
                    scratch);
        for (int way = in->through == MT_THROUGH_ALL && n > 0; way < (n > 0 ? 2 : 1); way++) {
            const uint8_t *own = way == 1 ? by_device : base;
            int            through = memchr(own, MT_HOME_THROUGH, units) != NULL;

            for (int64_t i = 0; i < in->n_several; i++) {
                const uint8_t *there = placed + (size_t)i * units;

                /* Beside a disk the drive is what a step waits for, and states there are not in
                 * memory. */
                if (through && (in->through_rate <= 0.0 || memchr(there, MT_HOME_DISK, units) ||
                                memchr(there, MT_HOME_DISK_WEIGHTS, units)))
                    continue;
                memcpy(homes + (size_t)made * units, through ? own : there, units);
                several[made++] = in->several[i] != 0;
            }
        }
    }
    return made;
}
