/* dev_cuda_none.c — what dev_cuda.c is in a build without CUDA. */
#include "../core/dev.h"

int mt_dev_cuda_built(void)
{
    return 0;
}

mt_status mt_dev_cuda_open(int index, mt_dev **out)
{
    (void)out;
    return MT_FAIL(MT_ENOTSUP, "cuda:%d: this build has no CUDA; install a CUDA toolkit and "
                   "build again, or use device \"cpu\"", index);
}
