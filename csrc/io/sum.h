/* sum.h — one number for the bytes of a block, that another block is not likely to have.
 *
 * Eight lanes take the block's 64-bit words in turn:
 *
 *     lane = (rotl(lane, 23) ^ word) * K
 *
 * and are joined in order, with the number of bytes, by the same step. For a given lane each step
 * is one to one in the word, and for a given word one to one in the lane: so a change within any
 * one word always changes the sum, and other changes do but for one case in some 2^64. It finds
 * what disks, cables and wrong offsets do to data, not what somebody does on purpose. One thread
 * reads about as fast as memory.
 */
#ifndef MT_SUM_H
#define MT_SUM_H

#include <stddef.h>
#include <stdint.h>

/* Of bytes at p; never 0, which means "never written" (core/blocks.h). */
uint64_t mt_block_sum(const void *p, size_t bytes);

#endif
