/* states.h — how the moments of an optimizer and the master of a weight are kept, one list.
 *
 *   FP32       m and v in fp32; 16 bits continue a bf16 weight: an fp32 master, exactly
 *   8BIT       m and v in a byte each, with fp32 scales for every 128 elements;
 *              the master as before
 *   8BIT_LO8   the same, with 8 bits that continue a bf16 weight, rounded stochastically
 *   8BIT_SR    the same, without any: bf16 weights are rounded stochastically
 * fp32 and fp16 weights have fp32 masters in all of them. What the bytes say: optim/adam8_code.h.
 */
#ifndef MT_STATES_H
#define MT_STATES_H

#include <stdint.h>

/* name, as users say it, bytes of a bf16 weight's low half */
#define MT_STATES_MAP(X) \
    X(FP32, "fp32", 2) X(8BIT, "8bit", 2) X(8BIT_LO8, "8bit-lo8", 1) X(8BIT_SR, "8bit-sr", 0)

#define MT_STATES_ENUM(name, text, low) MT_STATES_##name,
typedef enum mt_states { MT_STATES_MAP(MT_STATES_ENUM) MT_STATES_COUNT } mt_states;
#undef MT_STATES_ENUM

#define MT_STATES_GROUP 128              /* elements that share the scales of 8-bit moments */

const char *mt_states_name(mt_states s);            /* "8bit-sr"; "?" outside the list */

/* Bytes of one element of a bf16 weight's low half; 0 outside the list. */
static inline unsigned mt_states_low_bytes(mt_states s)
{
#define LOW(name, text, low) s == MT_STATES_##name ? low##u :
    return MT_STATES_MAP(LOW) 0u;
#undef LOW
}

/* Groups of n elements, the last one perhaps short. */
static inline int64_t mt_states_groups(int64_t n)
{
    return n / MT_STATES_GROUP + (n % MT_STATES_GROUP != 0);
}

#endif
