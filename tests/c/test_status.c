/* test_status.c — status.h and dtype.h: what a failure says, and what a number weighs. */
#include "check.h"

#include "../../csrc/core/dtype.h"

TEST(failure_says_what_and_where)
{
    CHECK_EQ(MT_FAIL(MT_EDEVMEM, "layer %d: %d MiB", 3, 812), MT_EDEVMEM);
    CHECK_SAYS("layer 3: 812 MiB [test_status.c:");
}

TEST(a_message_may_quote_the_previous_one)
{
    (void)MT_FAIL(MT_EINVAL, "inner");
    (void)MT_FAIL(MT_ESTATE, "outer (%s)", mt_last_error());
    CHECK_SAYS("outer (inner [test_status.c:");
}

TEST(a_long_message_is_cut_but_keeps_its_place)
{
    char text[4000];

    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    (void)MT_FAIL(MT_EINVAL, "%s", text);
    CHECK(strlen(mt_last_error()) < sizeof text / 2);
    CHECK_SAYS("x [test_status.c:");
    CHECK_EQ(mt_fail_again(MT_EINVAL, text), MT_EINVAL);
    CHECK(strlen(mt_last_error()) < sizeof text / 2);
}

static void *fail_elsewhere(void *saw)
{
    strcpy(saw, mt_last_error());
    (void)MT_FAIL(MT_EINVAL, "theirs");
    return NULL;
}

TEST(each_thread_has_its_own_message)
{
    char saw[2048] = "?";

    (void)MT_FAIL(MT_EINVAL, "ours");
    pthread_t thread = thread_start(fail_elsewhere, saw);
    thread_join(thread);
    CHECK_STR(saw, "");
    CHECK_SAYS("ours");
}

TEST(fail_again_carries_a_message_word_for_word)
{
    CHECK_EQ(mt_fail_again(MT_EDEVICE, "copy failed [dev.c:1]"), MT_EDEVICE);
    CHECK_STR(mt_last_error(), "copy failed [dev.c:1]");
    CHECK_EQ(mt_fail_again(MT_EDEVICE, mt_last_error()), MT_EDEVICE);
    CHECK_STR(mt_last_error(), "copy failed [dev.c:1]");
}

TEST(dtype_table_names_and_bytes)
{
    CHECK_STR(mt_dtype_name(MT_BF16), "BF16");
    CHECK_STR(mt_dtype_name(MT_F8E5M2), "F8E5M2");
    CHECK_STR(mt_dtype_name(MT_DTYPE_COUNT), "?");
    CHECK_STR(mt_dtype_name((mt_dtype)-1), "?");
    CHECK_EQ(mt_dtype_bytes(MT_F64), 8);
    CHECK_EQ(mt_dtype_bytes(MT_BOOL), 1);
    CHECK_EQ(mt_dtype_bytes(MT_DTYPE_COUNT), 0);
    CHECK_EQ(mt_dtype_bytes((mt_dtype)-1), 0);
}

/* fp16 by arithmetic in double, where everything below is exact: an independent definition. */
static double f16_value(uint16_t h)
{
    int    exponent = (h >> 10) & 31;
    double fraction = h & 1023;
    double value = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);

    return h & 0x8000 ? -value : value;
}

TEST(f16_widens_exactly_for_every_pattern)
{
    int wrong = 0;

    for (int h = 0; h < 65536; h++) {
        float f = mt_f16_to_f32((uint16_t)h);

        if ((h & 0x7fff) > 0x7c00)
            wrong += !isnan(f);
        else if ((h & 0x7fff) == 0x7c00)
            wrong += !(isinf(f) && (f < 0) == (h >> 15));
        else
            wrong += !((double)f == f16_value((uint16_t)h) && !!signbit(f) == h >> 15);
    }
    CHECK_EQ(wrong, 0);
}

/* Between two neighbours the half-way point goes to the even one, and a hair to either side goes
 * to the nearer. The half-way points are exact in fp32. 0x7c00 stands for 65536 here: what lies
 * half way and beyond becomes infinity. */
TEST(f16_narrows_to_nearest_even)
{
    int wrong = 0;

    for (int h = 0; h < 0x7c00; h++) {
        float    half = (float)((f16_value((uint16_t)h) + f16_value((uint16_t)(h + 1))) / 2);
        uint16_t even = (uint16_t)(h & 1 ? h + 1 : h);

        wrong += mt_f32_to_f16((float)f16_value((uint16_t)h)) != h;
        wrong += mt_f32_to_f16(half) != even;
        wrong += mt_f32_to_f16(-half) != (even | 0x8000);
        wrong += mt_f32_to_f16(nextafterf(half, 0.0f)) != h;
        wrong += mt_f32_to_f16(nextafterf(half, INFINITY)) != h + 1;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(mt_f32_to_f16(INFINITY), 0x7c00);
    CHECK_EQ(mt_f32_to_f16(-INFINITY), 0xfc00);
    CHECK_EQ(mt_f32_to_f16(NAN) & 0x7fff, 0x7e00);
    CHECK_EQ(mt_f32_to_f16(0x1p-149f), 0);
}

TEST(bf16_narrows_to_nearest_even)
{
    CHECK_EQ(mt_f32_to_bf16(1.0f), 0x3f80);
    CHECK_EQ(mt_f32_to_bf16(0x1.01p0f), 0x3f80);            /* tie, to even: down */
    CHECK_EQ(mt_f32_to_bf16(0x1.03p0f), 0x3f82);            /* tie, to even: up */
    CHECK_EQ(mt_f32_to_bf16(0x1.010002p0f), 0x3f81);
    CHECK_EQ(mt_f32_to_bf16(-0x1.fffffep127f), 0xff80);     /* rounds to infinity */
    CHECK_EQ(mt_f32_to_bf16(NAN), 0x7fc0);
    CHECK(mt_bf16_to_f32(0x3f81) == 0x1.02p0f);
}

/* A caller reads what it asked for without writing it first. */
TEST(memory_is_zero_and_there_even_for_none)
{
    int64_t *some, *none;

    CHECK_OK(MT_MAKE(some, 3, "here"));
    CHECK(some[0] == 0 && some[1] == 0 && some[2] == 0);
    CHECK_OK(MT_MAKE(none, 0, "here"));
    CHECK(none != NULL);
    free(none);
    free(some);
}

TEST(memory_that_is_not_there_is_null_and_told)
{
    int64_t one = 1, *p = &one;

    CHECK_EQ(MT_MAKE(p, INT64_MAX / 16, "layers.3"), MT_ENOMEM);
    CHECK(p == NULL);
    CHECK(strstr(mt_last_error(), "layers.3: no memory for 576460752303423487 times 8 bytes"));
}

/* Every array that grows keeps what it has, and reads zeros behind. */
TEST(an_array_that_grows_keeps_its_elements)
{
    FREED int *a = NULL;
    int64_t room = 0, before;

    for (int i = 0; i < 100; i++) {
        before = room;
        CHECK_OK(MT_GROW(a, room, i + 1, "here"));
        CHECK(room > i && (room == before || room >= 2 * before));
        for (int64_t k = i; k < room; k++)
            CHECK_EQ(a[k], 0);
        a[i] = i + 1;
        for (int k = 0; k <= i; k++)
            CHECK_EQ(a[k], k + 1);
        for (int64_t k = i + 1; k < room; k++)
            CHECK_EQ(a[k], 0);
    }
}

TEST(an_array_that_cannot_grow_is_as_it_was)
{
    int    *a = NULL, *was;
    int64_t room = 0;

    CHECK_OK(MT_GROW(a, room, 2, "here"));
    a[1] = 7;
    was = a;
    CHECK_EQ(MT_GROW(a, room, INT64_MAX / 8, "here"), MT_ENOMEM);
    CHECK(a == was && a[1] == 7 && room == 2);
    free(a);
}
