/* portion.c — the line of a unit, cut among owners. */
#include "portion.h"

/* At or before byte `at` of plane HI; behind the last parameter: the end of the line. */
static mt_bound bound_at(const mt_store *s, int unit, size_t at)
{
    int                  i = 0, n = mt_store_params(s, unit);
    const mt_param_desc *d;
    size_t               skipped;

    while (i + 1 < n && mt_store_offset(s, unit, i + 1) <= at)
        i++;
    if (n == 0)
        return (mt_bound){ 0, 0 };
    d = mt_store_desc(s, unit, i);
    skipped = (at - mt_store_offset(s, unit, i)) / mt_dtype_bytes(d->dtype);
    if (skipped >= (size_t)d->numel)     /* between this one's last element and the next one */
        return (mt_bound){ i + 1, 0 };
    return (mt_bound){ i, (int64_t)(skipped / MT_PORTION_GRAIN * MT_PORTION_GRAIN) };
}

/* k / owners of all bytes: the product would not fit. */
static size_t fraction_of(size_t bytes, size_t k, size_t owners)
{
    return bytes / owners * k + bytes % owners * k / owners;
}

mt_status mt_portion_of(const mt_store *s, int unit, int owner, int owners, mt_portion *out)
{
    size_t bytes = mt_store_hi_bytes(s, unit);

    if (unit < 0 || unit >= mt_store_units(s))
        return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d", unit, mt_store_units(s));
    if (owner < 0 || owner >= owners || owners > MT_OWNERS_MOST)
        return MT_FAIL(MT_EINVAL, "unit %s: there is no owner %d of %d; there may be 1 to %d, "
                       "counted from 0", mt_store_name(s, unit), owner, owners, MT_OWNERS_MOST);
    out->begin = bound_at(s, unit, fraction_of(bytes, (size_t)owner, (size_t)owners));
    out->end = bound_at(s, unit, fraction_of(bytes, (size_t)owner + 1, (size_t)owners));
    return MT_OK;
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

size_t mt_portion_byte(const mt_store *s, int unit, mt_bound b)
{
    if (b.param == mt_store_params(s, unit))
        return mt_store_hi_bytes(s, unit);
    return mt_store_offset(s, unit, b.param) +
           mt_store_plane_bytes(s, unit, b.param, MT_PLANE_HI, b.from);
}
