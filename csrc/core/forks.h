/* forks.h — what a child of fork() is not to have: our memory, and our files.
 *
 * A child is one thread. Ours are not in it, so the locks they held stay locked, and what waits for
 * them waits for ever. It shares every open file with its parent, lock and offset included. And
 * what it inherits of memory is paid for: pages that a driver has locked are copied by the fork
 * itself, the others by whoever writes them next.
 *
 * Nouns, in the order they appear below:
 *   forks    so many of them lie between the process that loaded us and this one. What notes the
 *            number when it is made, and finds another later, is in a child:
 *            it must not be used, waited for, or closed
 *   private  of memory: a child has no copy of it. Its addresses are taken there, and reading them
 *            is a fault: else the child's next mapping might come to lie where an address that
 *            somebody kept points to
 *            The same of a descriptor: a child has it not, so the file's lock and its room are the
 *            owner's alone
 *
 *     a->base = mmap(...);       mt_forks_private(a->base, a->bytes);
 *     mt_forks_shared(a->base);  munmap(a->base, a->bytes);
 *
 *     fd = mt_forks_open(path, O_RDWR | O_CLOEXEC, 0600);
 *     mt_forks_close(fd);
 *
 * Threads: any. fork() takes the locks inside, and waits while a file is opened or closed. What
 *          calls clone() or vfork() past libc is not noticed; memory is private there too.
 */
#ifndef MT_FORKS_H
#define MT_FORKS_H

#include <stddef.h>
#include <sys/types.h>

unsigned mt_forks(void);

/* Whole pages of an anonymous mapping, from its making to just before its end. Where the system has
 * no MADV_DONTFORK a child has a copy, as of any other memory. */
void mt_forks_private(void *base, size_t bytes);
void mt_forks_shared (void *base);                       /* not private: nothing to do */

/* As open() and close(); errno is open's. A descriptor that is not mt_forks_open's,
 * or its owner's, is not closed. */
int  mt_forks_open (const char *path, int flags, mode_t mode);
void mt_forks_close(int fd);

#endif
