/* adam8_code.h — private to csrc/optim: moments in 8 bits: what a byte means, and how it is made.
 *
 * A group is 128 elements in a row, counted from the parameter's first; c and k are an element's
 * bytes, cs and ks its group's scales, fp32:
 *
 *     m = cs * +-D(|c|)              c signed:   about the square root of |m|, with m's sign
 *     r = ks * D(k),  v = r * r      k unsigned: about the square root of r, r that of v
 *   then the step of adam.h, whose s is the new r; and back, over a group:
 *     M, R = the largest |m| and r, at most 2^62 and 2^63; 0 below 2^-64 and 2^-60
 *     cs = M / D(127),  ks = R / D(255)
 *     x = root(D(127) * |m| / M)                at most 127
 *     y = root(D(255) * r / R)                  at least x * f + f + 1; above 255: 255
 *     c = round(+-x), k = round(y)              stochastically: what lies between two codes becomes
 *                                               the upper one as often as it is near it
 *   f = sqrt(9/8 * D(255) / D(127) * M / (L R)), at most 2, and L = 1.75 * (1 - b1^t) / sqrt(1 -
 *   b2^t): however x and y are rounded, no code says |m| > L r, and no update that follows from
 *   codes alone is above 1.75 lr. Where M itself is more than 0.99 L R, the bound is 1.01 M / R
 *   instead: f is 2 there, and D(2 x) = 4 D(x).
 *
 * D(x) is twice x^2 with straight lines for curves: it has the value of 2 x^2 at 2^n, 16/9 x^2 at
 * 3/2 2^n, and is a line between these. In a float's bits that is one shift: twice the exponent is
 * the square of a power of two, and the fraction's first bit, which becomes the exponent's last,
 * halves the way to the next. So D(x) is x's bits shifted left by one, and root(q) q's bits shifted
 * right by one, exponents' bias apart; that is taken out by having x in units of 2^-63. No square
 * root, no polynomial, and the same bits everywhere. Its steps are those of x^2 within a factor of
 * 3/2; and since codes from 2 on lie at its corners or between them, what a code says is right in
 * the mean when the code is: a square is not, it says 1/4 too much half-way between two codes, in
 * each step anew.
 *
 * round: 16 bits of the element's hash, as a number a of [0, 1), and c = 255 - int(255 + a -+ x), k
 * = 255 - int(255 + a - y), each sum rounded once, by at most 2^-16 of a code; int is 0 for what is
 * negative or above 2^31 or NaN. Of bits, not of numbers, y is the larger of two: a NaN is the
 * largest. So an m that is not finite has the code 127, an r the code 255. x is made half a
 * millionth of itself smaller, so that its largest is not rounded above 127.
 *
 * Why roots: elements of one group differ by more than 255. A byte for sqrt(v) itself says 0 where
 * an element is 500 times smaller than its group's largest, and then the next gradient moves it 3
 * lr; with the root of the root that is 65,000 times. Why stochastic: a moment decays by less than
 * half a code a step, and a code rounded to nearest would never follow. docs/numerics.md has the
 * measurements. Source: Gu et al., FlashOptim, arXiv 2602.23349: companded bytes with absmax scales
 * in groups (there m by softsign, v by its square root, groups of 32, fp16 scales, rounded to
 * nearest). That a float's bits are nearly its logarithm: Mitchell 1962.
 *
 * The same 16 bits round an element's weight where it is kept in fewer than 32: what is lost of it
 * and of its moments is right in the mean, each for itself. The hash of two neighbours, the even
 * one of which has its lower 16 bits, depends on the step, the parameter's key and the even one's
 * number alone, so on neither threads nor placement: a Weyl sequence (Knuth's multiplier), one
 * shift, a word of the step's own, and one multiplication (of C. Wellons' search for mixers of
 * least bias).
 */
#ifndef MT_ADAM8_CODE_H
#define MT_ADAM8_CODE_H

#include <stdint.h>

#define MT__C_SQUARE    32256.0f                 /* D(127) */
#define MT__K_SQUARE    130048.0f                /* D(255) */
#define MT__C_INVERSE   (1.0f / MT__C_SQUARE)
#define MT__K_INVERSE   (1.0f / MT__K_SQUARE)
#define MT__C_BELOW     32255.96875f
#define MT__SQUARE_SAG  1.125                    /* D is never below 2 x^2 by more */

/* Codes as floats while they are rooted and squared: small,
 * so that twice an exponent is one too. */
#define MT__CODE_UNIT   0x1p-63f
#define MT__CODE_UNITS  0x1p63f                  /* in a code */

/* What x and y are subtracted from: bits of a hash below the bits of 255. */
#define MT__CODE_TOP    255
#define MT__RANDOM_ONTO 0x437f0000u
#define MT__RANDOM      0x0000ffffu

#define MT__LEAST_MOST  2.0f                     /* f */
#define MT__M_LEAST     0x1p-64f                 /* of a group's largest */
#define MT__R_LEAST     0x1p-60f
#define MT__M_LARGEST   0x1p62f
#define MT__M_FINITE    0x1p127f                 /* above: a negative one may have the code -128 */
#define MT__R_LARGEST   0x1p63f
#define MT__UPDATE_MOST 1.75                     /* lr, of what codes alone say */

#define MT__HASH_STEP   0x9e3779b1u              /* from one element to the next */
#define MT__HASH_MIX    0x846ca68bu
#define MT__HASH_HIGH   0x7feb352du              /* times the element's number's upper 32 bits */

/* The word that a group's hashes begin with; first: its first element in the parameter. */
#define MT__HASH_FIRST(seed, first)                                         \
    ((seed)[0] + (uint32_t)((uint64_t)(first) >> 32) * MT__HASH_HIGH        \
               + (uint32_t)((uint64_t)(first) & 0xffffffffu) * MT__HASH_STEP)

/* Weights with fewer bits below hi than fp32 has: bits are added before the rest is cut off. From
 * here on none are, so that no finite weight becomes infinite. */
#define MT__SR_MOST     0x7f7f0000u

#endif
