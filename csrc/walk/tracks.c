/* tracks.c — what windows may keep, before anything is counted: search.h says what a track is. */
#include "search.h"

#include <math.h>

enum { PARTS = 8 };              /* of the layers that can; the first so many parts of them do */
enum { ON_HOST = MT_KEEP_LINKED + 1, IN_FILE = 2 * ON_HOST };      /* the same is kept there */

typedef struct maker {
    const mt_search *in;
    int64_t  m, n, windows;      /* n: tracks that are made */
    uint8_t *least;              /* [n_windows] what a window keeps where a track says nothing */
    int64_t *layers, n_layers;   /* at work */
    int64_t  count[PARTS + 1];
    int      n_counts;
    uint8_t *modes, *flags;
} maker;

/* Of a backward; NAN: the window has no such mode. */
static double seconds(const maker *k, int64_t w, int64_t mode)
{
    const mt_search *in = k->in;

    return in->backward_s[(k->m * in->n_kinds + in->kind[w]) * in->n_modes + mode];
}

static int has(const maker *k, int64_t w, int64_t mode) { return !isnan(seconds(k, w, mode)); }

/* Of the layers at work the first eighth, two, ..., all. */
static void count_layers(maker *k, int from_none)
{
    k->n_counts = 0;
    if (from_none)
        k->count[k->n_counts++] = 0;
    for (int64_t part = 1; part <= PARTS; part++) {
        int64_t n = (k->n_layers * part + PARTS - 1) / PARTS;

        if (n > 0 && (k->n_counts == 0 || n > k->count[k->n_counts - 1]))
            k->count[k->n_counts++] = n;
    }
}

static void begin_track(maker *k)
{
    int64_t at = k->n++ * k->windows;

    for (int64_t w = 0; w < k->windows; w++)
        k->modes[at + w] = k->least[w], k->flags[at + w] = 0;
}

/* In the track that was begun. */
static void fix(maker *k, int64_t w, int mode)
{
    k->modes[(k->n - 1) * k->windows + w] = (uint8_t)mode;
    k->flags[(k->n - 1) * k->windows + w] = MT_TRACK_FIXED;
}

static void fix_layers(maker *k, int64_t begin, int64_t end, int mode)
{
    for (; begin < end; begin++)
        fix(k, k->layers[begin], mode);
}

/* The first layers keep what they keep in the first way, those behind them in the second; `both`:
 * there are always some of each. */
static void first_layers(maker *k, int first, int second, int both)
{
    k->n_layers = 0;
    for (int64_t w = 0; w < k->windows; w++)
        if (has(k, w, second) && k->in->learns[w])
            k->layers[k->n_layers++] = w;
    count_layers(k, 0);
    for (int i = 0; i < k->n_counts; i++)
        for (int j = i + both; j < k->n_counts; j++) {
            begin_track(k);
            fix_layers(k, 0, k->count[i], first);
            fix_layers(k, k->count[i], k->count[j], second);
            if (first == second)
                break;
        }
}

/* Layers of which the next may be linked to them, each layer in one pair. */
static void find_pairs(maker *k)
{
    k->n_layers = 0;
    for (int64_t w = 0; w + 1 < k->windows; w++)
        if ((k->n_layers == 0 || k->layers[k->n_layers - 1] != w - 1) && k->in->learns[w] &&
            k->in->learns[w + 1] && has(k, w, MT_KEEP_LINKED) && has(k, w + 1, MT_KEEP_LINKED))
            k->layers[k->n_layers++] = w;
}

static void fix_pairs(maker *k, int64_t begin, int64_t end, int first, int second)
{
    for (; begin < end; begin++) {
        fix(k, k->layers[begin], first);
        fix(k, k->layers[begin] + 1, second);
    }
}

/* Pairs of which the first keeps its input, and the outputs of attention are kept of both: of the
 * first pairs in a file, of those behind in host memory, or there inputs alone, and of the others
 * on the device. */
static void linked_pairs(maker *k, int files)
{
    int64_t n = 0;

    find_pairs(k);
    for (int64_t i = 0; i < k->n_layers; i++)            /* where that takes less time */
        if (seconds(k, k->layers[i] + 1, MT_KEEP_LINKED) <
            seconds(k, k->layers[i] + 1, MT_KEEP_REPLAY))
            k->layers[n++] = k->layers[i];
    k->n_layers = n;
    count_layers(k, 1);
    for (int way = 0; way < (n == 0 ? 0 : files ? 3 : 1); way++) {       /* 0: none in a file */
        int first = (way == 1 ? MT_KEEP_ATTENTION : MT_KEEP_REPLAY) + IN_FILE;
        int second = (way == 1 ? MT_KEEP_LINKED : MT_KEEP_REPLAY) + IN_FILE;

        for (int a = 0; a < k->n_counts; a++)
            for (int b = a; b < k->n_counts && (way == 0) == (a == 0); b++)
                for (int c = b; c < k->n_counts; c++) {
                    begin_track(k);
                    fix_pairs(k, 0, k->count[a], first, second);
                    fix_pairs(k, k->count[a], k->count[b], MT_KEEP_ATTENTION + ON_HOST,
                              MT_KEEP_LINKED + ON_HOST);
                    fix_pairs(k, k->count[b], k->count[c], MT_KEEP_REPLAY + ON_HOST,
                              MT_KEEP_REPLAY + ON_HOST);
                    for (int64_t i = k->count[c]; i < n; i++)
                        k->flags[(k->n - 1) * k->windows + k->layers[i]] |= MT_TRACK_PAIR;
                }
    }
}

/* All that have it keep what is asked for. Of pairs the second is linked, all else keeps
 * attention's output instead. */
static void as_asked(maker *k, int64_t asked)
{
    int linked = k->in->is_linked[asked] != 0;

    begin_track(k);
    for (int64_t w = 0; w < k->windows; w++)
        fix(k, w, has(k, w, asked) ? (int)asked - (linked ? MT_KEEP_LINKED - MT_KEEP_ATTENTION : 0)
                                   : k->least[w]);
    find_pairs(k);
    for (int64_t i = 0; linked && i < k->n_layers; i++)
        fix(k, k->layers[i] + 1, (int)asked);
}

int64_t mt_search_tracks(const mt_search *in, int64_t m, int64_t asked, int files, int is_long,
                         uint8_t *modes, uint8_t *flags, int64_t *scratch)
{
    int64_t windows = in->step.n_windows;
    maker   k = { .in = in, .m = m, .windows = windows, .modes = modes, .flags = flags,
                  .layers = scratch, .least = (uint8_t *)(scratch + windows) };

    for (int64_t w = 0; w < windows; w++)
        for (k.least[w] = MT_KEEP_REPLAY; k.least[w] < MT_KEEP_SAVED && !has(&k, w, k.least[w]);)
            k.least[w]++;
    if (asked >= 0) {
        as_asked(&k, asked);
        return k.n;
    }
    begin_track(&k);
    for (int keep = MT_KEEP_REPLAY; keep <= MT_KEEP_SAVED; keep++)
        first_layers(&k, keep + ON_HOST, keep + ON_HOST, 0);
    /* An attention's output spares more time than all else: some layers keep it in host memory,
     * with their input, and those before them the input alone, in what is left there. */
    if (is_long) {
        first_layers(&k, MT_KEEP_REPLAY + ON_HOST, MT_KEEP_ATTENTION + ON_HOST, 1);
        linked_pairs(&k, files);
    }
    for (int keep = MT_KEEP_REPLAY; files && keep <= MT_KEEP_SAVED; keep++)
        first_layers(&k, keep + IN_FILE, keep + ON_HOST, 0);
    return k.n;
}
