/* test_gemm.c — the executable form of ops/gemm.h: orders, a BLAS's words, and the definition. */
#include "numbers.h"
#include "../../csrc/ops/gemm.h"

static int64_t below(int64_t n) { return random_below(&random_state, n); }

/* An element by row and column, as torch's strides say: what both ways of reading are judged by. */
static float element(const mt_gemm_matrix *m, mt_dtype dt, int64_t i, int64_t j)
{
    return get(m->data, dt, m->by_columns ? i + j * m->ld : i * m->ld + j);
}

/* Magnitudes over 12 powers of two, so that the order of addition shows in the last bits. */
static float random_value(void)
{
    return (float)ldexp((double)(int32_t)random_bits(), (int)below(12) - 38);
}

/* A matrix with random values and, around its lines, NaN: whoever reads there shows it. */
static mt_gemm_matrix random_matrix(mt_dtype dt, int64_t rows, int64_t cols, int by_columns)
{
    int64_t  each = by_columns ? rows : cols, lines = by_columns ? cols : rows,
             ld = each + below(4);
    int64_t  size[] = { rows, cols }, stride[] = { by_columns ? 1 : ld, by_columns ? ld : 1 };
    int64_t  n = lines * ld + 1;
    mt_gemm_matrix m = { 0 };

    m.data = malloc((size_t)n * mt_dtype_bytes(dt));
    REQUIRE(m.data != NULL);
    for (int64_t i = 0; i < n; i++)
        set(m.data, dt, i, i % ld < each && i / ld < lines ? random_value() : NAN);
    CHECK_OK(mt_gemm_matrix_of("m", size, stride, &m));
    return m;
}

static mt_gemm random_gemm(mt_dtype ab, mt_dtype c_type, int64_t m, int64_t n, int64_t k)
{
    return (mt_gemm){
        .ab = ab, .c_type = c_type,
        .c = random_matrix(c_type, m, n, 0),
        .a = random_matrix(ab, m, k, (int)below(2)),
        .b = random_matrix(ab, k, n, (int)below(2)),
    };
}

static void drop(mt_gemm *g)
{
    free(g->a.data);
    free(g->b.data);
    free(g->c.data);
}

#define GEMM CLOSED_BY(drop) mt_gemm

/* ---- orders ---- */

static void order_of(int64_t rows, int64_t cols, int64_t s0, int64_t s1, int by_columns, int64_t ld)
{
    int64_t        size[] = { rows, cols }, stride[] = { s0, s1 };
    mt_gemm_matrix m;

    CHECK_OK(mt_gemm_matrix_of("m", size, stride, &m));
    CHECK_EQ(m.rows, rows);
    CHECK_EQ(m.cols, cols);
    CHECK_EQ(m.by_columns, by_columns);
    CHECK_EQ(m.ld, ld);
}

TEST(order_is_read_from_sizes_and_strides)
{
    order_of(3, 5, 5, 1, 0, 5);          /* dense */
    order_of(3, 5, 9, 1, 0, 9);          /* some columns of a wider one */
    order_of(3, 5, 1, 3, 1, 3);          /* .t() of a dense one */
    order_of(3, 5, 1, 7, 1, 7);
    order_of(3, 1, 5, 1, 0, 5);          /* a column of a matrix by rows: one element a line */
    order_of(3, 1, 1, 1, 0, 1);
    order_of(3, 1, 1, 3, 0, 1);
    order_of(1, 5, 77, 1, 0, 5);         /* one row: its stride says nothing */
    order_of(1, 5, 0, 1, 0, 5);
    order_of(1, 5, 1, 9, 1, 9);          /* a row of a matrix by columns */
    order_of(1, 1, 0, 0, 0, 1);
    order_of(0, 5, 5, 1, 0, 5);
    order_of(3, 0, 1, 1, 0, 1);
}

/* ---- in a BLAS's words ---- */

/* What a BLAS does, from its documentation: everything by columns. Sums in double, k ascending. */
static float blas_element(const struct mt_gemm_seen *left, const struct mt_gemm_seen *right,
                          mt_dtype dt, int64_t i, int64_t j, int64_t k)
{
    double sum = 0;

    for (int64_t d = 0; d < k; d++) {
        float x = get(left->data, dt, left->transposed ? d + i * left->ld : i + d * left->ld);
        float y = get(right->data, dt, right->transposed ? j + d * right->ld : d + j * right->ld);

        sum += (double)x * (double)y;
    }
    return (float)sum;
}

static float wanted(const mt_gemm *g, int64_t i, int64_t j)
{
    double sum = 0;

    for (int64_t d = 0; d < g->a.cols; d++)
        sum += (double)element(&g->a, g->ab, i, d) * (double)element(&g->b, g->ab, d, j);
    return (float)sum;
}

static void check_seen(const struct mt_gemm_seen *s)
{
    CHECK(s->ld >= s->rows && s->rows > 0 && s->cols > 0);
}

TEST(blas_computes_the_transpose_of_c)
{
    random_state = 1;
    for (int round = 0; round < 200; round++) {
        int64_t      m = 1 + below(6), n = 1 + below(6), k = 1 + below(6);
        GEMM g = random_gemm(MT_BF16, MT_F32, m, n, k);
        mt_gemm_blas s = mt_gemm_to_blas(&g);

        check_seen(&s.left);
        check_seen(&s.right);
        check_seen(&s.out);
        CHECK_EQ(s.left.transposed ? s.left.cols : s.left.rows, n);
        CHECK_EQ(s.left.transposed ? s.left.rows : s.left.cols, k);
        CHECK_EQ(s.right.transposed ? s.right.cols : s.right.rows, k);
        CHECK_EQ(s.right.transposed ? s.right.rows : s.right.cols, m);
        CHECK_EQ(s.out.rows, n);
        CHECK_EQ(s.out.cols, m);
        CHECK_EQ(s.out.transposed, 0);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) {
                ((float *)s.out.data)[j + i * s.out.ld] =
                    blas_element(&s.left, &s.right, MT_BF16, j, i, k);
                CHECK(element(&g.c, MT_F32, i, j) == wanted(&g, i, j));
            }
    }
}

TEST(bytes_end_behind_the_last_element)
{
    mt_gemm_matrix rows = { .rows = 3, .cols = 5, .ld = 9 };
    mt_gemm_matrix columns = { .rows = 3, .cols = 5, .ld = 4, .by_columns = 1 };

    CHECK_EQ(mt_gemm_bytes(&rows, MT_F32), (2 * 9 + 5) * 4);
    CHECK_EQ(mt_gemm_bytes(&columns, MT_BF16), (4 * 4 + 3) * 2);
}

static int same_key(const mt_gemm *x, int device_x, float beta_x, const mt_gemm *y, int device_y,
                    float beta_y)
{
    mt_gemm_key a = mt_gemm_key_of(x, device_x, beta_x), b = mt_gemm_key_of(y, device_y, beta_y);

    return memcmp(&a, &b, sizeof a) == 0;
}

TEST(key_knows_what_may_change_an_algorithm_and_nothing_else)
{
    _Alignas(64) static char memory[256];
    mt_gemm g = { .ab = MT_BF16, .c_type = MT_F32,
                  .c = { memory, 8, 16, 16, 0 }, .a = { memory, 8, 32, 32, 0 },
                  .b = { memory, 32, 16, 16, 0 } };
    mt_gemm h = g;

    CHECK(same_key(&g, 0, 1.0f, &h, 0, 0.5f));
    CHECK(!same_key(&g, 0, 1.0f, &h, 0, 0.0f));
    CHECK(!same_key(&g, 0, 1.0f, &h, 1, 1.0f));
    h.c.data = memory + 16;                      /* elsewhere, but not less aligned than matters */
    CHECK(same_key(&g, 0, 1.0f, &h, 0, 1.0f));
    h.c.data = memory + 8;
    CHECK(!same_key(&g, 0, 1.0f, &h, 0, 1.0f));
#define DIFFERS(change) do { h = g; change; CHECK(!same_key(&g, 0, 1.0f, &h, 0, 1.0f)); } while (0)
    DIFFERS(h.ab = MT_F16);
    DIFFERS(h.c_type = MT_BF16);
    DIFFERS(h.tf32 = 1);
    DIFFERS(h.a.ld = 40);
    DIFFERS(h.b.ld = 24);
    DIFFERS(h.c.ld = 24);
    DIFFERS(h.a.by_columns = 1);
    DIFFERS(h.b.by_columns = 1);
    DIFFERS(h.c.rows = 9);
    DIFFERS(h.c.cols = 17);
    DIFFERS(h.a.cols = 33);
#undef DIFFERS
}

/* ---- the definition ---- */

/* Word by word from the header. */
static float by_the_book(const mt_gemm *g, int64_t i, int64_t j, float alpha, float beta, float c)
{
    volatile float sum = 0, product;     /* volatile: no compiler may fuse or reorder */

    for (int64_t k = 0; k < g->a.cols; k++) {
        product = element(&g->a, g->ab, i, k) * element(&g->b, g->ab, k, j);
        sum = sum + product;
    }
    sum = alpha * sum;
    product = beta * c;
    return beta != 0 ? sum + product : sum;
}

TEST(host_is_the_definition_to_the_bit)
{
    static const mt_dtype types[][2] = { { MT_F32, MT_F32 }, { MT_BF16, MT_F32 },
                                         { MT_BF16, MT_BF16 }, { MT_F16, MT_F32 },
                                         { MT_F16, MT_F16 } };
    static const int64_t  sizes[][3] = { { 1, 1, 1 }, { 3, 5, 7 }, { 65, 9, 300 }, { 64, 64, 256 },
                                         { 70, 130, 513 } };
    static const float    factors[][2] = { { 1, 0 }, { 1, 1 }, { 0.3f, 0.7f } };
    mt_pool *pool;

    random_state = 2;
    CHECK_OK(mt_pool_open(3, &pool));
    for (int t = 0; t < 5 * 5 * 3; t += UNDER_TSAN ? 7 : 2) {
        const mt_dtype *types_of = types[t % 5];
        const int64_t  *size = sizes[t / 5 % 5];
        const float    *by = factors[t / 25];
        GEMM g = random_gemm(types_of[0], types_of[1], size[0], size[1], size[2]);
        mt_gemm_matrix  before = g.c;
        size_t          bytes = mt_gemm_bytes(&g.c, g.c_type);

        before.data = malloc(bytes);
        REQUIRE(before.data != NULL);
        memcpy(before.data, g.c.data, bytes);
        mt_gemm_host(pool, &g, by[0], by[1]);
        for (int64_t i = 0; i < size[0]; i++)
            for (int64_t j = 0; j < size[1]; j++) {
                float    old = element(&before, g.c_type, i, j);
                uint32_t rounded = 0;

                set(&rounded, g.c_type, 0, by_the_book(&g, i, j, by[0], by[1], old));
                CHECK(element(&g.c, g.c_type, i, j) == get(&rounded, g.c_type, 0));
            }
        free(before.data);
    }
    mt_pool_close(pool);
}
