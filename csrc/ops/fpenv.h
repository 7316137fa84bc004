/* fpenv.h — nearest rounding and gradual underflow for one stretch of work,
 * whatever the thread had.
 *
 * A library built with -ffast-math switches denormals off in the thread that loads it, and
 * threads inherit the setting from their parent: without this, bits would depend on what else the
 * process imports. Call the arithmetic through a function that is not inlined in between:
 * compilers do not order floating-point operations against the control register.
 */
#ifndef MT_FPENV_H
#define MT_FPENV_H

#if defined(__x86_64__)
#include <xmmintrin.h>

static inline unsigned mt__fp_begin(void)
{
    unsigned was = _mm_getcsr();
    _mm_setcsr(0x1f80);              /* all exceptions masked, to nearest, no FTZ, no DAZ */
    return was;
}
static inline void mt__fp_end(unsigned was) { _mm_setcsr(was); }
#else
static inline unsigned mt__fp_begin(void) { return 0; }
static inline void     mt__fp_end(unsigned was) { (void)was; }
#endif

#endif
