// A stand-in for libcuda.so.1. "Device" memory is host memory. Copies run late, on a thread per stream, at a set speed.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { INIT, REGISTER, UNREGISTER, OFF, ONTO, SYNC, EVENT, WAIT, OTHER, KINDS };
typedef struct Range { uintptr_t at; size_t n; struct Range *next; } Range;
typedef struct Job { void *to; const void *from; size_t n; struct Job *next; } Job;
typedef struct Stream { Job *head, *tail; long queued, done; pthread_mutex_t lock; pthread_cond_t news; } Stream;
typedef struct Event { Stream *stream; long upto; } Event;

static Range *ranges;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static double gbs;
static long calls[KINDS], unregistered_copies, fail_kinds, fail_in = -1, fail_times, fail_with, most_registered = -1;
static int held;
static __thread void *contexts[8];
static __thread int depth;
#define NEEDS_CONTEXT if (!depth) return 201

void fake_reset(double speed) {
  pthread_mutex_lock(&mutex);
  gbs = speed; fail_kinds = fail_in = 0; fail_times = 0; most_registered = -1; unregistered_copies = 0; held = 0;
  memset(calls, 0, sizeof calls);
  while (ranges) { Range *r = ranges; ranges = r->next; free(r); }
  pthread_mutex_unlock(&mutex);
}
// The in-th next call of these kinds (a bit each) and those after it fail, `times` in all.
void fake_fail(long kinds, long in, long times, long with) { fail_kinds = kinds; fail_in = in; fail_times = times; fail_with = with; }
void fake_most_registered(long bytes) { most_registered = bytes; }
void fake_hold(int on) { __atomic_store_n(&held, on, __ATOMIC_SEQ_CST); }  // no queued copy goes on meanwhile
long fake_calls(long kind) { return calls[kind]; }
long fake_unregistered(void) { return unregistered_copies; }
long fake_registered(void) { long n = 0; for (Range *r = ranges; r; r = r->next) n += r->n; return n; }

static int enter(int kind) {
  pthread_mutex_lock(&mutex);
  calls[kind]++;
  int status = 0;
  if (fail_times > 0 && (fail_kinds >> kind & 1) && (fail_in <= 0 || fail_in-- == 0)) { fail_in = 0; fail_times--; status = fail_with; }
  pthread_mutex_unlock(&mutex);
  return status;
}

int cuInit(unsigned flags) { return enter(INIT); }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return enter(OTHER); }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = (void *)(intptr_t)(device + 1); return enter(OTHER); }
int cuCtxPushCurrent_v2(void *context) {
  int status = enter(OTHER);
  if (status) return status;
  if (!context || depth == 8) return 201;
  contexts[depth++] = context;
  return 0;
}
int cuCtxPopCurrent_v2(void **out) {
  int status = enter(OTHER);
  NEEDS_CONTEXT;
  *out = contexts[--depth];  // also where it is told to fail: a thread's contexts are no copy
  return status;
}
int fake_contexts(void) { return depth; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  int status = enter(OTHER);
  if (status) return status;
  NEEDS_CONTEXT;
  *free = *total = (size_t)1 << 40;
  return 0;
}

int cuMemHostRegister_v2(void *at, size_t n, unsigned flags) {
  int status = enter(REGISTER);
  if (status) return status;
  NEEDS_CONTEXT;
  if (!n || (uintptr_t)at % 4096 || n % 4096) return 1;
  uintptr_t a = (uintptr_t)at;
  pthread_mutex_lock(&mutex);
  long all = n;
  for (Range *r = ranges; r; r = r->next) {
    all += r->n;
    if (a < r->at + r->n && r->at < a + n) status = 712;
  }
  if (!status && most_registered >= 0 && all > most_registered) status = 2;
  if (!status) { Range *r = malloc(sizeof *r); r->at = a; r->n = n; r->next = ranges; ranges = r; }
  pthread_mutex_unlock(&mutex);
  return status;
}
int cuMemHostUnregister(void *at) {
  int status = enter(UNREGISTER);
  if (status) return status;
  NEEDS_CONTEXT;
  status = 713;
  pthread_mutex_lock(&mutex);
  for (Range **r = &ranges; *r; r = &(*r)->next)
    if ((*r)->at == (uintptr_t)at) { Range *old = *r; *r = old->next; free(old); status = 0; break; }
  pthread_mutex_unlock(&mutex);
  return status;
}
static int where(uintptr_t at, size_t n) {  // 1: wholly in one registration, 0: in none, -1: it crosses a border
  int found = 0;
  pthread_mutex_lock(&mutex);
  for (Range *r = ranges; r; r = r->next) {
    if (at >= r->at && at + n <= r->at + r->n) { found = 1; break; }
    if (at < r->at + r->n && r->at < at + n) found = -1;
  }
  pthread_mutex_unlock(&mutex);
  return found;
}

static void nap(double s) { struct timespec t = {(time_t)s, (long)((s - (time_t)s) * 1e9)}; nanosleep(&t, 0); }
static void move(void *to, const void *from, size_t n) {
  for (size_t at = 0; at < n; at += 65536) {
    size_t part = n - at < 65536 ? n - at : 65536;
    while (__atomic_load_n(&held, __ATOMIC_SEQ_CST)) nap(0.0005);
    if (gbs > 0) nap(part / gbs / 1e9);
    memcpy((char *)to + at, (const char *)from + at, part);
  }
}
static void *run(void *argument) {
  Stream *s = argument;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->head) pthread_cond_wait(&s->news, &s->lock);
    Job *job = s->head;
    pthread_mutex_unlock(&s->lock);
    move(job->to, job->from, job->n);
    pthread_mutex_lock(&s->lock);
    s->head = job->next;
    if (!s->head) s->tail = 0;
    s->done++;
    pthread_cond_broadcast(&s->news);
    pthread_mutex_unlock(&s->lock);
    free(job);
  }
  return 0;
}
int cuStreamCreate(void **out, unsigned flags) {
  int status = enter(OTHER);
  if (status) return status;
  NEEDS_CONTEXT;
  Stream *s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, 0);
  pthread_cond_init(&s->news, 0);
  pthread_t thread;
  pthread_create(&thread, 0, run, s);
  pthread_detach(thread);
  *out = s;
  return 0;
}
static int copy(int kind, void *to, const void *from, uintptr_t host, size_t n, Stream *s) {
  int status = enter(kind);
  if (status) return status;
  NEEDS_CONTEXT;
  if (!n) return 1;
  int place = where(host, n);
  if (place < 0) return 1;
  if (!place) { pthread_mutex_lock(&mutex); unregistered_copies++; pthread_mutex_unlock(&mutex); move(to, from, n); return 0; }
  Job *job = calloc(1, sizeof *job);
  job->to = to; job->from = from; job->n = n;
  pthread_mutex_lock(&s->lock);
  if (s->tail) s->tail->next = job; else s->head = job;
  s->tail = job;
  s->queued++;
  pthread_cond_broadcast(&s->news);
  pthread_mutex_unlock(&s->lock);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) { return copy(OFF, to, (void *)from, (uintptr_t)to, n, s); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *s) { return copy(ONTO, (void *)to, from, (uintptr_t)from, n, s); }

static void until(Stream *s, long number) {
  pthread_mutex_lock(&s->lock);
  while (s->done < number) pthread_cond_wait(&s->news, &s->lock);
  pthread_mutex_unlock(&s->lock);
}
int cuStreamSynchronize(void *argument) {
  int status = enter(SYNC);
  if (status) return status;  // without waiting: the copies go on
  NEEDS_CONTEXT;
  Stream *s = argument;
  pthread_mutex_lock(&s->lock);
  long number = s->queued;
  pthread_mutex_unlock(&s->lock);
  until(s, number);
  return 0;
}
int cuEventCreate(void **out, unsigned flags) { *out = calloc(1, sizeof(Event)); return enter(EVENT); }
int cuEventRecord(void *argument, void *stream) {
  int status = enter(EVENT);
  if (status) return status;
  NEEDS_CONTEXT;
  Event *event = argument;
  Stream *s = stream;
  pthread_mutex_lock(&s->lock);
  event->stream = s;
  event->upto = s->queued;
  pthread_mutex_unlock(&s->lock);
  return 0;
}
int cuEventSynchronize(void *argument) {
  int status = enter(WAIT);
  if (status) return status;  // without waiting: the copies go on
  NEEDS_CONTEXT;
  Event *event = argument;
  if (event->stream) until(event->stream, event->upto);
  return 0;
}
