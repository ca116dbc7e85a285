/* Counts what torch's allocator gives and takes back, in a process that loads this before libc.

   Every block of a tensor in RAM comes from posix_memalign, called by libc10; every one goes through free.  Whoever
   asked for it, and in whatever thread, is counted; what others ask of malloc is not. */

#include <errno.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_memalign(size_t alignment, size_t nbytes);
extern void __libc_free(void *block);

#define SLOTS (1u << 20) /* a power of two, far above the number of blocks there are at a time */

static struct { uintptr_t block; size_t nbytes; } blocks[SLOTS];
static uintptr_t from, until; /* where libc10 lies */
static long now, most, count;
static int busy;

static void lock(void) { while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) {} }
static void unlock(void) { __atomic_store_n(&busy, 0, __ATOMIC_RELEASE); }
static uint32_t slot(uintptr_t block) { return (uint32_t)((block >> 6) * 0x9E3779B97F4A7C15u >> 44); }

static uint32_t find(uintptr_t block)
{
    uint32_t i = slot(block);
    while (blocks[i].block && blocks[i].block != block) i = (i + 1) % SLOTS;
    return i;
}

static void came(void *block, size_t nbytes)
{
    lock();
    uint32_t i = find((uintptr_t)block);
    blocks[i].block = (uintptr_t)block;
    blocks[i].nbytes = nbytes;
    now += (long)nbytes;
    count++;
    if (now > most) most = now;
    unlock();
}

static void went(void *block)
{
    lock();
    uint32_t hole = find((uintptr_t)block);
    if (blocks[hole].block) {
        now -= (long)blocks[hole].nbytes;
        /* Whoever stood behind it because its place was taken moves up. */
        for (uint32_t i = (hole + 1) % SLOTS; blocks[i].block; i = (i + 1) % SLOTS) {
            uint32_t own = slot(blocks[i].block);
            if (((i - own) % SLOTS) >= ((i - hole) % SLOTS)) {
                blocks[hole] = blocks[i];
                hole = i;
            }
        }
        blocks[hole].block = 0;
    }
    unlock();
}

int posix_memalign(void **block, size_t alignment, size_t nbytes)
{
    void *found = __libc_memalign(alignment, nbytes);
    if (!found) return ENOMEM;
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (caller >= from && caller < until) came(found, nbytes);
    *block = found;
    return 0;
}

void free(void *block)
{
    if (block && until) went(block);
    __libc_free(block);
}

void allocator_watch(size_t first, size_t last) { from = first; until = last; }
void allocator_reset(void) { lock(); most = now; unlock(); }
long allocator_now(void) { return now; }
long allocator_most(void) { return most; }
long allocator_count(void) { return count; }
