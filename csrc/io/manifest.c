/* manifest.c — the text beside a scratch file, and who is still alive. */
#include "manifest.h"

#include "../core/forks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#define BOOT_ID "/proc/sys/kernel/random/boot_id"

/* ---- processes -------------------------------------------------------------------------- */

/* The file's text, cut at `cap`; 0: it cannot be read. */
static int read_text(const char *path, char *out, size_t cap)
{
    FILE  *f = fopen(path, "re");
    size_t n;

    if (f == NULL)
        return 0;
    n = fread(out, 1, cap - 1, f);
    fclose(f);
    out[n] = 0;
    return n > 0;
}

/* Clock ticks from boot to the start of a process; 0: there is none, or nobody tells. */
static uint64_t started(long pid)
{
    char        path[64], text[1024];
    const char *at;
    uint64_t    ticks = 0;

    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    if (!read_text(path, text, sizeof text) || (at = strrchr(text, ')')) == NULL)
        return 0;
    /* Field 22; the name, which may hold anything, was field 2. */
    for (int field = 2; field < 22 && at != NULL; field++)
        at = strchr(at + 1, ' ');
    return at != NULL && sscanf(at, " %" SCNu64, &ticks) == 1 ? ticks : 0;
}

static void boot_id(char *out, size_t cap)
{
    if (!read_text(BOOT_ID, out, cap))
        out[0] = 0;
    out[strcspn(out, "\n")] = 0;
}

/* As it stands in a manifest. */
static void host_field(char *out, size_t cap)
{
    struct utsname about;

    snprintf(out, cap, "\"host\": \"%.64s\"", uname(&about) == 0 ? about.nodename : "");
}

/* By what the manifest says; what cannot be told counts as alive, and so does what another
 * machine's process holds: its boots and processes are not ours to look up. */
static int process_lives(const char *text)
{
    const char *pid_at = strstr(text, "\"pid\": "), *ticks_at = strstr(text, "\"started\": ");
    const char *boot_at = strstr(text, "\"boot\": \"");
    char        boot[64], host[80];
    long        pid = 0;
    uint64_t    ticks = 0;

    host_field(host, sizeof host);
    if (pid_at == NULL || ticks_at == NULL || boot_at == NULL ||
        sscanf(pid_at, "\"pid\": %ld", &pid) != 1 ||
        sscanf(ticks_at, "\"started\": %" SCNu64, &ticks) != 1 || started((long)getpid()) == 0 ||
        strstr(text, host) == NULL)
        return 1;
    boot_id(boot, sizeof boot);
    if (boot[0] != 0 && strncmp(boot_at + strlen("\"boot\": \""), boot, strlen(boot)) != 0)
        return 0;
    return started(pid) == ticks;
}

/* ---- writing ---------------------------------------------------------------------------- */

static mt_status failed(const char *what, const char *path)
{
    return MT_FAIL(MT_EDISK, "%s %s: %s", what, path, strerror(errno));
}

/* dir/name with its suffix taken off and another one put on. */
static int path_of(char *out, const char *dir, const char *name, const char *suffix)
{
    size_t      stem = strlen(name);
    const char *dot = strrchr(name, '.');
    int         n;

    if (dot != NULL)
        stem = (size_t)(dot - name);
    n = snprintf(out, PATH_MAX, "%s/%.*s%s", dir, (int)stem, name, suffix);
    return n > 0 && n < PATH_MAX;
}

static mt_status sync_directory(const char *dir)
{
    int       fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    mt_status st = MT_OK;

    /* Some file systems sync no directories; the name is then as safe as they make it. */
    if (fd < 0 || (fsync(fd) != 0 && errno != EINVAL))
        st = failed("nvme: cannot sync the directory", dir);
    if (fd >= 0)
        close(fd);
    return st;
}

static mt_status write_text(const char *path, const char *text)
{
    size_t    n = strlen(text);
    int       fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    mt_status st = MT_OK;

    if (fd < 0 || write(fd, text, n) != (ssize_t)n || fsync(fd) != 0)
        st = failed("nvme: cannot write the manifest", path);
    if (fd >= 0)
        close(fd);
    return st;
}

mt_status mt_manifest_write(const char *dir, const char *name, uint64_t bytes)
{
    char      path[PATH_MAX], beside[PATH_MAX], text[512], boot[64], host[80];
    mt_status st;

    if (!path_of(path, dir, name, MT_MANIFEST_SUFFIX) || !path_of(beside, dir, name, ".json.new"))
        return MT_FAIL(MT_EINVAL, "nvme: the path of a file in %s is longer than %d characters",
                       dir, PATH_MAX);
    boot_id(boot, sizeof boot);
    host_field(host, sizeof host);
    snprintf(text, sizeof text, "{\"pid\": %ld, \"started\": %" PRIu64 ", \"boot\": \"%s\", %s, "
             "\"file\": \"%s\", \"bytes\": %" PRIu64 "}\n", (long)getpid(), started((long)getpid()),
             boot, host, name, bytes);
    MT_TRY(write_text(beside, text));
    if (rename(beside, path) != 0) {
        st = failed("nvme: cannot put the manifest in its place,", path);
        goto fail;
    }
    return sync_directory(dir);
fail:
    unlink(beside);
    return st;
}

void mt_manifest_remove(const char *dir, const char *name)
{
    char path[PATH_MAX];

    if (path_of(path, dir, name, MT_MANIFEST_SUFFIX))
        unlink(path);
}

/* ---- what others left ------------------------------------------------------------------- */

/* The scratch file of a manifest that was found, if it is nobody's. */
static uint64_t remove_left(const char *dir, const char *manifest)
{
    char        path[PATH_MAX], beside[PATH_MAX], text[512];
    struct stat about = { 0 };
    int         fd, free_to_go, gone;

    if (!path_of(path, dir, manifest, MT_MANIFEST_STATES) ||
        !path_of(beside, dir, manifest, MT_MANIFEST_SUFFIX) ||
        !read_text(beside, text, sizeof text))
        return 0;
    fd = mt_forks_open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0);
    gone = fd < 0 && errno == ENOENT;
    /* 1: nobody holds the scratch file, which is ours until fd is closed; -1: the file system knows
     * no locks. */
    free_to_go = fd < 0 ? (gone ? -1 : 0)
               : flock(fd, LOCK_EX | LOCK_NB) == 0 ? 1 : errno == EWOULDBLOCK ? 0 : -1;
    if (free_to_go == 1 || (free_to_go == -1 && !process_lives(text))) {
        if (fd >= 0 && fstat(fd, &about) == 0)
            unlink(path);
        unlink(beside);
    }
    if (fd >= 0)
        mt_forks_close(fd);
    return (uint64_t)about.st_blocks * 512;
}

static int is_manifest(const char *name)
{
    size_t n = strlen(name), suffix = strlen(MT_MANIFEST_SUFFIX);

    return strncmp(name, MT_MANIFEST_PREFIX, strlen(MT_MANIFEST_PREFIX)) == 0 && n > suffix &&
           strcmp(name + n - suffix, MT_MANIFEST_SUFFIX) == 0;
}

mt_status mt_manifest_sweep(const char *dir, uint64_t *bytes)
{
    DIR           *d = opendir(dir);
    struct dirent *entry;
    uint64_t       removed = 0;

    if (d == NULL)
        return MT_FAIL(MT_EDISK, "nvme: %s: %s; name a directory that is there and may be written",
                       dir, strerror(errno));
    while ((entry = readdir(d)) != NULL)
        if (is_manifest(entry->d_name))
            removed += remove_left(dir, entry->d_name);
    closedir(d);
    *bytes = removed;
    return MT_OK;
}
