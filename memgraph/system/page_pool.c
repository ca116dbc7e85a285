/* A pool of pages for torch's large blocks on a CPU.

   Before:  free(a); b = malloc(n)    the system takes the pages of a, and gives b others, one page fault each
   After:   free(a); b = malloc(n)    b gets the pages of a: they are moved to where b is, if a was in pieces

   The pool has as many pages as its blocks ever had at once, in whatever order they come and go.  Up to `limit` bytes of
   them it keeps; what is over goes back to the system.  page_pool.py loads it, and says what the functions do.

   Torch's `c10::Allocator` is a table of functions; this one is a copy of the default allocator's, in which two are
   others.  So no header of torch is needed, and no C++. */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEAST (128UL << 10)       /* bytes of a block; smaller ones are malloc's */
#define SMALLEST_MOVE (64UL << 10) /* of several mappings, where the kernel moves one at a time */
#define MOST_MOVES 8192           /* each may leave a mapping; the kernel allows a process 65530 */

typedef uintptr_t Address;
typedef struct { Address at, nbytes; } Range;
typedef struct { Range* all; long count, room; } Ranges; /* by address */
typedef void Free(void*);
typedef struct { void* data; Free* deleter; void* context; signed char type, index; } DataPtr; /* as in libstdc++ */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Ranges spare, used;
static Address page;
static uintptr_t limit;
static struct { long requests, moves, new_pages, in_use, most, held; } counts;
static long live, peak; /* bytes of all blocks that torch has got here, small ones too */
static long moves; /* since the pool was last in whole pieces */

static void* (*torch_alloc)(size_t);
static Free* torch_free;
static void* (*torch_reporter)(void);
static void (*torch_made)(void*, void*, size_t);
static void (*torch_freed)(void*, void*);

static long first_at(const Ranges* ranges, Address at) {
  long low = 0, high = ranges->count;
  while (low < high) {
    long middle = (low + high) / 2;
    if (ranges->all[middle].at < at) low = middle + 1; else high = middle;
  }
  return low;
}

static int insert(Ranges* ranges, Range range) {
  if (ranges->count == ranges->room) {
    long room = ranges->room ? 2 * ranges->room : 512;
    Range* all = realloc(ranges->all, room * sizeof(Range));
    if (!all) return 0;
    ranges->all = all;
    ranges->room = room;
  }
  long i = first_at(ranges, range.at);
  memmove(ranges->all + i + 1, ranges->all + i, (ranges->count++ - i) * sizeof(Range));
  ranges->all[i] = range;
  return 1;
}

static Range take_out(Ranges* ranges, long i) {
  Range range = ranges->all[i];
  memmove(ranges->all + i, ranges->all + i + 1, (--ranges->count - i) * sizeof(Range));
  return range;
}

static void give_back(Range range) {
  counts.held -= range.nbytes;
  if (munmap((void*)range.at, range.nbytes)) madvise((void*)range.at, range.nbytes, MADV_DONTNEED);
}

static void keep(Range range) {
  long i = first_at(&spare, range.at);
  if (i < spare.count && range.at + range.nbytes == spare.all[i].at) range.nbytes += take_out(&spare, i).nbytes;
  if (i && spare.all[i - 1].at + spare.all[i - 1].nbytes == range.at) spare.all[i - 1].nbytes += range.nbytes;
  else if (!insert(&spare, range)) give_back(range);
}

/* Take bytes of a spare range. */
static Range split(long i, Address nbytes) {
  Range* from = spare.all + i;
  if (from->nbytes <= nbytes) return take_out(&spare, i);
  Range range = {from->at, nbytes};
  from->at += nbytes;
  from->nbytes -= nbytes;
  return range;
}

static void shrink(void) {
  while ((Address)counts.held > limit && spare.count) {
    Address over = (counts.held - limit + page - 1) / page * page;
    give_back(split(spare.count - 1, over));
  }
}

/* Return how many bytes of a range are now at another address; what they held does not matter. */
static Address move(Range range, Address to) {
  if (mremap((void*)range.at, range.nbytes, range.nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void*)to) != MAP_FAILED) {
    counts.moves++, moves++;
    return range.nbytes;
  }
  if (range.nbytes <= SMALLEST_MOVE) return 0;
  Address half = range.nbytes / 2 / page * page, moved = move((Range){range.at, half}, to);
  return moved < half ? moved : half + move((Range){range.at + half, range.nbytes - half}, to + half);
}

static long largest(void) {
  long found = 0;
  for (long i = 1; i < spare.count; i++) if (spare.all[i].nbytes > spare.all[found].nbytes) found = i;
  return found;
}

/* Return a new range with the pages of spare ones, and new pages where these are too few; 0 if there are none. */
static Address gather(Address nbytes) {
  /* Without access until there are pages, so that limits of a process count each page once. */
  void* place = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return 0;
  Address at = (Address)place, got = 0;
  if (moves > MOST_MOVES) {
    while (spare.count) give_back(take_out(&spare, spare.count - 1));
    moves = 0;
  }
  while (got < nbytes && spare.count) {
    Range piece = split(largest(), nbytes - got);
    Address moved = move(piece, at + got);
    got += moved;
    if (moved < piece.nbytes) give_back((Range){piece.at + moved, piece.nbytes - moved});
  }
  if (got == nbytes) return at;
  Address rest = nbytes - got;
  void* new = mmap((void*)(at + got), rest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (new == MAP_FAILED) {
    munmap((void*)(at + got), rest);
    if (got) keep((Range){at, got});
    return 0;
  }
  counts.new_pages += rest / page;
  counts.held += rest;
  return at;
}

static void* take(Address nbytes) {
  nbytes = (nbytes + page - 1) / page * page;
  long best = -1;
  for (long i = 0; i < spare.count; i++)
    if (spare.all[i].nbytes >= nbytes && (best < 0 || spare.all[i].nbytes < spare.all[best].nbytes)) best = i;
  Range block = {best < 0 ? gather(nbytes) : split(best, nbytes).at, nbytes};
  if (!block.at) return NULL;
  if (!insert(&used, block)) {
    give_back(block);
    return NULL;
  }
  counts.requests++;
  counts.in_use += nbytes;
  if (counts.in_use > counts.most) counts.most = counts.in_use;
  shrink();
  return (void*)block.at;
}

static void note(long nbytes) {
  long now = __atomic_add_fetch(&live, nbytes, __ATOMIC_RELAXED), before = peak;
  while (now > before && !__atomic_compare_exchange_n(&peak, &before, now, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static void free_block(void* block) {
  if (!block) return;
  torch_freed(torch_reporter(), block);
  pthread_mutex_lock(&lock);
  long i = first_at(&used, (Address)block);
  int is_own = i < used.count && used.all[i].at == (Address)block;
  if (is_own) {
    Range range = take_out(&used, i);
    note(-(long)range.nbytes);
    counts.in_use -= range.nbytes;
    keep(range);
    shrink();
  }
  pthread_mutex_unlock(&lock);
  if (is_own) return;
  note(-(long)malloc_usable_size(block));
  torch_free(block);
}

static DataPtr allocate(void* self, size_t nbytes) {
  void* block = NULL;
  if (nbytes >= LEAST && limit) {
    pthread_mutex_lock(&lock);
    block = take(nbytes);
    pthread_mutex_unlock(&lock);
  }
  if (block) {
    note((nbytes + page - 1) / page * page);
  } else {
    block = torch_alloc(nbytes);
    note(malloc_usable_size(block));
  }
  torch_made(torch_reporter(), block, nbytes);
  return (DataPtr){block, free_block, block, 0, -1};
}

static Free* raw_deleter(const void* self) { return free_block; }

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

enum { COMPLETE_DESTRUCTOR, DELETING_DESTRUCTOR, ALLOCATE, IS_SIMPLE, RAW_DELETER, ENTRIES = 8 };

/* Return whether torch's allocator is as it was when this was written, and is replaced by this one. */
int pool_install(void* (*get)(void), void (*set)(void*, unsigned char), void* (*alloc)(size_t), Free* free,
                 void* (*reporter)(void), void (*made)(void*, void*, size_t), void (*freed)(void*, void*)) {
  static void* table[2 + ENTRIES];
  static struct { void** entries; } allocator;
  page = sysconf(_SC_PAGESIZE);
  void*** present = get();
  void** entries = *present;
  Free* deleter = ((Free * (*)(const void*)) entries[RAW_DELETER])(present);
  DataPtr block = ((DataPtr(*)(void*, size_t))entries[ALLOCATE])(present, page);
  if (!block.data || block.context != block.data || block.deleter != deleter || block.type != 0 || block.index != -1)
    return 0;
  deleter(block.data);
  torch_alloc = alloc, torch_free = free, torch_reporter = reporter, torch_made = made, torch_freed = freed;
  memcpy(table, entries - 2, sizeof table); /* before the entries are an offset and a type */
  table[2 + ALLOCATE] = (void*)allocate;
  table[2 + RAW_DELETER] = (void*)raw_deleter;
  allocator.entries = table + 2;
  pthread_atfork(before_fork, after_fork, after_fork);
  set(&allocator, 1);
  return get() == (void*)&allocator;
}

void pool_limit(long nbytes) {
  pthread_mutex_lock(&lock);
  limit = nbytes;
  shrink();
  pthread_mutex_unlock(&lock);
}

void pool_counts(long* to) {
  pthread_mutex_lock(&lock);
  memcpy(to, &counts, sizeof counts);
  pthread_mutex_unlock(&lock);
}

/* Begin to measure a peak, and return the bytes that are live now. */
long pool_begin_peak(void) {
  long now = __atomic_load_n(&live, __ATOMIC_RELAXED);
  __atomic_store_n(&peak, now, __ATOMIC_RELAXED);
  return now;
}

long pool_peak(void) { return __atomic_load_n(&peak, __ATOMIC_RELAXED); }
