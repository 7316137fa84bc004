/* adam8_code.h — private to csrc/optim: moments in 8 bits. What a byte means, and how one is made.
 *
 * A group is 128 elements in a row, counted from the parameter's first; c and k are an element's bytes,
 * cs and ks its group's scales, fp32:
 *
 *     m = cs * (c * |c|)                        c signed:   the square root of |m|, with m's sign
 *     r = ks * (k * k),  v = r * r              k unsigned: the square root of r, r that of v
 *   then the step of adam.h, whose s is the new r; and back, over a group:
 *     M, R = the largest |m| and r, at most 2^62 and 2^63; 0 below 2^-64 and 2^-60
 *     cs = M / 127^2,  ks = R / 255^2
 *     x = 127 * sqrt(|m| / M)                   at most 127
 *     y = 255 * sqrt(r / R)                     at least x * f + f + 1, at most 255
 *     c = round(+-x), k = round(y)              stochastically: what lies between two codes becomes the
 *                                               upper one as often as it is near it
 *   f = 255/127 * sqrt(M / (L R)), at most 2, and L = 1.75 * (1 - b1^t) / sqrt(1 - b2^t): however x and y are
 *   rounded, no code says |m| > L r, and no update that follows from codes alone is above 1.75 lr. Where M itself
 *   is more than 0.99 L R, f is 2 and the bound M / R: no code says |m| > 1.01 (M / R) r.
 *
 * round: a number of [0, 1) from the element's hash is added, and all below a code is cut off. x with its sign
 * gets 15 bits and a half, and 128 more, so that no sum is negative; y gets 23 bits, and 1 more, which keeps them
 * in a float. Sums are rounded to nearest, by at most 2^-17 of a code. A comparison with NaN keeps the other value;
 * c has the gradient's sign then.
 *
 * y's root is rounded correctly. x's need not be, and is 8 operations that every processor has: with q = |m| / M
 * times a little less than 127^2, a guess w of 1/sqrt(q) from q's bits (within 4 %), s = q w, e = s w = q w^2, and
 * sqrt(q) = s / sqrt(e) = s * P(e), P a cubic within 1e-6. x is 1e-6 to 3e-6 of itself too small: by at most 4e-4 of
 * a code, and never above 127. That is 6e-6 of m in a step that forgets 1 - b1 of it; a step forgets 100 times less
 * of v, so y's is rounded correctly.
 *
 * Why square roots: elements of one group differ by more than 255. A byte for sqrt(v) itself says 0 where an
 * element is 500 times smaller than its group's largest, and then the next gradient moves it 3 lr; with the
 * root of the root that is 65,000 times. Why stochastic: a moment decays by less than half a code a
 * step, and a code rounded to nearest would never follow. docs/numerics.md has the measurements.
 * Source: Gu et al., FlashOptim, arXiv 2602.23349: companded bytes with absmax scales in groups (there m by
 * softsign, v by its square root, groups of 32, fp16 scales, rounded to nearest).
 *
 * The hash of an element depends on the step, the parameter's key and the element's number alone, so on
 * neither threads nor placement: a Weyl sequence (Knuth's multiplier), one shift, a word of the step's own, and
 * one multiplication (of C. Wellons' search for mixers of least bias).
 */
#ifndef MT_ADAM8_CODE_H
#define MT_ADAM8_CODE_H

#include <stdint.h>

#define MT__C_MOST      127
#define MT__K_MOST      255.0f
#define MT__C_SQUARE    16129.0f                 /* 127^2 */
#define MT__K_SQUARE    65025.0f                 /* 255^2 */
#define MT__C_INVERSE   (1.0f / MT__C_SQUARE)
#define MT__K_INVERSE   (1.0f / MT__K_SQUARE)
#define MT__C_BELOW     16128.9375f              /* the largest q */

/* What is added before all below a code is cut off: bits of the hash, in a float's bits. */
#define MT__C_RANDOM    0x0000fffeu
#define MT__C_ONTO      0x43000001u              /* 128 + 2^-16 */
#define MT__C_OFFSET    128
#define MT__K_RANDOM    0x007fffffu
#define MT__K_ONTO      0x3f800000u              /* 1 */
#define MT__K_OFFSET    1

/* w = MT__ROOT_GUESS - bits / 2; P(e) = ((D e + C) e + B) e + A, the least relative error where w leaves e. */
#define MT__ROOT_GUESS  0x5f360000u
#define MT__ROOT_A      0x1.1a26f2p+1f
#define MT__ROOT_B      -0x1.1e5976p+1f
#define MT__ROOT_C      0x1.5c7a18p+0f
#define MT__ROOT_D      -0x1.505460p-2f
#define MT__LEAST_MOST  2.0f                     /* f */
#define MT__M_LEAST     0x1p-64f                 /* of a group's largest */
#define MT__R_LEAST     0x1p-60f
#define MT__M_LARGEST   0x1p62f
#define MT__R_LARGEST   0x1p63f
#define MT__UPDATE_MOST 1.75                     /* lr, of what codes alone say */

#define MT__HASH_STEP   0x9e3779b1u              /* from one element to the next */
#define MT__HASH_MIX    0x846ca68bu
#define MT__HASH_HIGH   0x7feb352du              /* times the element's number's upper 32 bits */

/* The word that a group's hashes begin with; first: its first element in the parameter. */
#define MT__HASH_FIRST(seed, first)                                         \
    ((seed)[0] + (uint32_t)((uint64_t)(first) >> 32) * MT__HASH_HIGH        \
               + (uint32_t)((uint64_t)(first) & 0xffffffffu) * MT__HASH_STEP)

/* Weights with fewer bits below hi than fp32 has: bits are added before the rest is cut off. From here
 * on none are, so that no finite weight becomes infinite. */
#define MT__SR_MOST     0x7f7f0000u

#endif
