/* ops_gemm.h — a product whose arguments are checked, on the device of the call. */
#ifndef MT_OPS_GEMM_H
#define MT_OPS_GEMM_H

#include "ops.h"
#include "../ops/gemm.h"

/* c = alpha * a @ b + beta * c, or + bias and base where there are codes. */
mt_status mt_op_product_cpu(const mt_gemm *g, float alpha, float beta);
/* like: c's argument. beta: of codes 1 where there is a base, else 0. */
mt_status mt_op_product_cuda(const mt_op_call *c, const mt_op_arg *like, const mt_gemm *g,
                             float alpha, float beta);

#endif
