/* sum.c — eight lanes, so that multiplications of one do not wait for those of another. */
#include "sum.h"

#include <string.h>

#define LANES  8
#define FACTOR 0x9e3779b97f4a7c15u       /* odd, so that multiplying by it can be undone */

static uint64_t step(uint64_t lane, uint64_t word)
{
    return ((lane << 23 | lane >> 41) ^ word) * FACTOR;
}

uint64_t mt_block_sum(const void *p, size_t bytes)
{
    const unsigned char *at = p;
    size_t               left = bytes;
    uint64_t             lane[LANES] = { 1, 2, 3, 4, 5, 6, 7, 8 }, word[LANES], sum = bytes;

    for (; left >= sizeof word; left -= sizeof word, at += sizeof word) {
        memcpy(word, at, sizeof word);
        for (int i = 0; i < LANES; i++)
            lane[i] = step(lane[i], word[i]);
    }
    memset(word, 0, sizeof word);
    memcpy(word, at, left);
    for (int i = 0; i < LANES; i++)
        sum = step(sum, step(lane[i], word[i]));
    return sum != 0 ? sum : 1;
}
