/* portion.c — the line of a unit, cut among owners. */
#include "portion.h"

/* The last bound at or before k / owners of plane HI; behind the last parameter: the line's end. */
static mt_bound bound_of(const mt_shape *s, size_t k, size_t owners)
{
    size_t at = s->bytes / owners * k + s->bytes % owners * k / owners;  /* bytes * k overflows */
    size_t skipped;
    int    i = 0;

    if (s->n == 0)
        return (mt_bound){ 0, 0 };
    while (i + 1 < s->n && s->offset[i + 1] <= at)
        i++;
    skipped = (at - s->offset[i]) / mt_dtype_bytes(s->desc[i].dtype);
    if (skipped >= (size_t)s->desc[i].numel)     /* between its last element and the next one */
        return (mt_bound){ i + 1, 0 };
    return (mt_bound){ i, (int64_t)(skipped / MT_PORTION_GRAIN * MT_PORTION_GRAIN) };
}

mt_status mt_shape_cut(const mt_shape *s, const char *name, int owner, int owners, mt_portion *out)
{
    if (owner < 0 || owner >= owners || owners > MT_OWNERS_MOST)
        return MT_FAIL(MT_EINVAL, "unit %s: there is no owner %d of %d; there may be 1 to %d, "
                       "counted from 0", name, owner, owners, MT_OWNERS_MOST);
    out->begin = bound_of(s, (size_t)owner, (size_t)owners);
    out->end = bound_of(s, (size_t)owner + 1, (size_t)owners);
    return MT_OK;
}

size_t mt_shape_byte(const mt_shape *s, mt_bound b)
{
    return b.param >= s->n ? s->bytes    /* of a unit that is not there, too */
           : s->offset[b.param] + (size_t)b.from * mt_dtype_bytes(s->desc[b.param].dtype);
}

/* Elements of the parameter that lie before the bound. */
static int64_t before(mt_bound b, int param, int64_t numel)
{
    return param < b.param ? numel : param == b.param ? b.from : 0;
}

int64_t mt_portion_part(const mt_portion *p, int param, int64_t numel, int64_t *from)
{
    int64_t first = before(p->begin, param, numel), n = before(p->end, param, numel) - first;

    *from = n > 0 ? first : 0;
    return n;
}
