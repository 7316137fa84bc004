/* numa.c — reads sysfs' lists of nodes, and asks the kernel by its own calls:
 * there is no library for it. */
#include "numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* "0-3,8" */
static void parse(const char *list, mt_nodes *out)
{
    unsigned long from, to;
    int           used;

    memset(out, 0, sizeof *out);
    while (sscanf(list, "%lu%n", &from, &used) == 1) {
        list += used;
        to = from;
        if (sscanf(list, "-%lu%n", &to, &used) == 1)
            list += used;
        for (; from <= to && from < MT_NODES; from++)
            out->bits[from / MT_NODE_BITS] |= 1ul << from % MT_NODE_BITS;
        list += *list == ',';
    }
}

/* Leaves out what is not in a file's list; without the file nothing.
 * prefix: of the line that has it. */
static void keep_listed(const char *path, const char *prefix, mt_nodes *nodes)
{
    char     line[4096];
    mt_nodes listed;
    FILE    *f = fopen(path, "re");

    if (f == NULL)
        return;
    while (fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, prefix, strlen(prefix)) != 0)
            continue;
        parse(line + strlen(prefix), &listed);
        for (size_t i = 0; i < sizeof nodes->bits / sizeof *nodes->bits; i++)
            nodes->bits[i] &= listed.bits[i];
        break;
    }
    (void)fclose(f);
}

void mt__nodes_read(const char *sys, const char *status, mt_nodes *out)
{
    static const char *const lists[] = { "online", "has_cpu", "has_memory" };
    char path[4096];

    memset(out, 0xff, sizeof *out);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        (void)snprintf(path, sizeof path, "%s/devices/system/node/%s", sys, lists[i]);
        keep_listed(path, "", out);
    }
    keep_listed(status, "Mems_allowed_list:", out);
    out->n = 0;
    for (size_t i = 0; i < sizeof out->bits / sizeof *out->bits; i++)
        out->n += __builtin_popcountl(out->bits[i]);
    if (out->n == 0 || out->n == MT_NODES) {         /* nothing is known */
        parse("0", out);
        out->n = 1;
    }
}

static mt_nodes here;                                /* written once */

static void read_here(void)
{
    mt__nodes_read("/sys", "/proc/self/status", &here);
}

const mt_nodes *mt_nodes_here(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, read_here);
    return &here;
}

int mt__numa_place(const mt_nodes *nodes, void *p, size_t bytes)
{
    /* The kernel takes one bit less than it is told of. */
    unsigned long bits = nodes != NULL ? (unsigned long)MT_NODES + 1 : 0;

    return syscall(SYS_mbind, p, bytes, nodes != NULL ? MPOL_INTERLEAVE : MPOL_LOCAL,
                   nodes != NULL ? nodes->bits : NULL, bits, 0u) == 0 ? 0 : errno;
}

/* Where there is a choice, and the user has made none. */
int mt_numa_place(void *p, size_t bytes, int local)
{
    int mode = MPOL_DEFAULT;

    if (mt_nodes_here()->n < 2 ||
        syscall(SYS_get_mempolicy, &mode, NULL, 0ul, NULL, 0ul) != 0 || mode != MPOL_DEFAULT)
        return 0;
    return mt__numa_place(local ? NULL : mt_nodes_here(), p, bytes);
}
