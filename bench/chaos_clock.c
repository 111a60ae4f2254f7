/* A wall clock that jumps: what is read of it is off by the seconds that stand, as eight bytes, in the file CHAOS_CLOCK.

   cc -shared -fPIC -o chaos_clock.so chaos_clock.c -ldl; LD_PRELOAD=chaos_clock.so CHAOS_CLOCK=offset command

   As when the system's clock is set, only the time of day jumps. A wait until a time of day goes by the kernel's clock, so
   that such times are taken back to it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none = 0;
static const volatile int64_t *offset = &none;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("CHAOS_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) offset = found;
    close(file);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int wrong = real(clock, now);
    if (!wrong && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return wrong;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int wrong = real(now, zone);
    if (!wrong) now->tv_sec += *offset;
    return wrong;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

/* of a condition's two clocks the other one counts from the machine's start */
static struct timespec kernels(const struct timespec *until) {
    struct timespec found = *until;
    if (found.tv_sec > 1000000000) found.tv_sec -= *offset;
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static __typeof__(&pthread_cond_timedwait) real; /* x86 has an older one of the name, which dlsym may give */
    if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec found = kernels(until);
    return real(condition, mutex, &found);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    REAL(sem_timedwait);
    struct timespec found = kernels(until);
    return real(semaphore, &found);
}
