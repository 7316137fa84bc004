/* attention_cudnn.h — private to csrc/ops and its binding: gradients of attention by torch's
 * cuDNN, with the same bits each time.
 *
 * torch asks cuDNN for a kernel that adds up the gradients of queries in fp32 as its blocks come.
 * The same graph without the sums between has dS, of 16 bits, in the workspace and multiplies it by
 * the keys once: nothing depends on time, and rows of a thousand tokens take no longer.
 *
 *   key      shapes, strides, types: what decides the kernel
 *   choice   its plan: made at a key's first use, kept for the process
 *
 *     const mt_attention_choice *how;
 *     MT_TRY(mt__attention_cudnn_choose(&key, &how));
 *     MT_TRY(mt__attention_cudnn_run(how, data, scale, scratch, stream));
 *
 * Threads: any; one mutex over the choices, and over a launch, since a handle has one stream.
 * Errors:  MT_ENOTSUP: no cuDNN in the process, or it has no such kernel; the caller has another.
 */
#ifndef MT_ATTENTION_CUDNN_H
#define MT_ATTENTION_CUDNN_H

#include "../core/status.h"
#include <stddef.h>
#include <stdint.h>

enum { MT_ATT_Q = 1, MT_ATT_K, MT_ATT_V, MT_ATT_OUT, MT_ATT_DOUT, MT_ATT_DQ, MT_ATT_DK, MT_ATT_DV,
       MT_ATT_LSE, MT_ATT_BIAS, MT_ATT_TENSORS };

typedef struct mt_attention_key {                /* words only: compared as memory */
    int64_t device, half, causal;                /* half: fp16, not bf16 */
    int64_t rows, hq, hk, queries, keys, dim;
    int64_t bias_rows, bias_heads;               /* 0: no bias */
    int64_t stride[MT_ATT_TENSORS][4];           /* of [row, head, token, number], in elements */
} mt_attention_key;

typedef struct mt_attention_choice mt_attention_choice;

/* The device that the key names is current. */
mt_status mt__attention_cudnn_choose(const mt_attention_key *key, const mt_attention_choice **out);
size_t    mt__attention_cudnn_workspace(const mt_attention_choice *how);         /* bytes */
/* data: by the numbers above, aligned to 16 bytes. */
mt_status mt__attention_cudnn_run(const mt_attention_choice *how, void *const data[MT_ATT_TENSORS],
                                  float scale, void *workspace, uintptr_t stream);

#endif
