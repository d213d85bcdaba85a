/* Measures one kernel and an optional reference in a process of its own.
 *
 *   harness REPORT OUTPUT REPEATS MIN_NS MAX_NS PAIRS MEMORY PARENT SLOWER  KERNEL [KERNEL]
 *   KERNEL = LIBRARY OUTPUT_BYTES INPUTS {FILE BYTES}*INPUTS
 *
 * REPORT, OUTPUT and each FILE are inherited file descriptors. The candidate is the first kernel, the reference the
 * second. A candidate whose first run takes more than SLOWER times as long as the reference's is stopped; 0 sets no
 * limit. REPORT is a memory map that is updated at every stage, so it shows how far a process got before it died;
 * `harness.py` reads it. Every kernel has its own arrays: read-only inputs, an output filled with NaN, and an
 * inaccessible page after the end of each.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define ALIGNMENT 64u
#define HUGE ((uintptr_t)2 << 20)
/* Duration of a sample: far above the resolution of the clock and the time to wake a thread. */
#define SAMPLE_NS 1000000
#define MAX_CALLS 1000000
/* A first run includes cold caches and the start of threads. In runs longer than this many samples both are
 * negligible. */
#define LONG_RUN 50
/* Added to the limit of a candidate's first run, for interruptions by the system. */
#define GRACE_NS 20000000

enum { CANDIDATE, REFERENCE, SIDES };
/* Stages; a step is 2 * stage + side. */
enum { STARTING, LOADING, FIRST_RUN, TIMING, DONE };

typedef struct {
    int64_t step;        /* current step: 2 * stage + side */
    int64_t pairs;       /* samples of each side */
    int64_t calls[SIDES]; /* calls in a sample */
    int64_t wall_ns;     /* from before the first sample to after the last */
    int64_t cpu_ns;      /* CPU time of this process during the samples */
    int64_t waited_ns;   /* time that runnable threads waited for a CPU; -1 if unknown */
    int64_t threads;     /* threads alive at the end */
    int64_t cpus;        /* CPUs that OpenMP may use */
    char message[512];   /* error; empty without an error */
    int64_t samples[][SIDES]; /* nanoseconds of `calls` calls */
} Report;

typedef struct {
    const char *library;
    void (*run)(const void *const *inputs, void *const *outputs);
    const void **inputs;
    void *output;
    size_t output_bytes;
} Kernel;

static Report *report;

static void set_step(int stage, int side) { *(volatile int64_t *)&report->step = 2 * stage + side; }

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(report->message, sizeof report->message, format, values);
    va_end(values);
    _exit(1);
}

static void too_slow(int signal) {
    static const char text[] = "it takes too many times as long as the reference and was stopped";
    (void)signal;
    memcpy(report->message, text, sizeof text);
    _exit(1);
}

/* Stops the run after `ns` nanoseconds; 0 removes the limit. */
static void alarm_in(int64_t ns) {
    struct itimerval timer = {.it_value = {ns / 1000000000, ns % 1000000000 / 1000}};
    signal(SIGALRM, too_slow);
    setitimer(ITIMER_REAL, &timer, NULL);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t cpu_now(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return ((int64_t)use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1000000000 +
           ((int64_t)use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1000;
}

/* Total time that all threads have waited for a CPU, and their number. */
static int64_t waited_now(int64_t *threads) {
    DIR *tasks = opendir("/proc/self/task");
    int64_t sum = tasks ? 0 : -1;
    *threads = 0;
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        char path[300];
        long long ran, waited;
        if (task->d_name[0] == '.')
            continue;
        ++*threads;
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file || fscanf(file, "%lld %lld", &ran, &waited) != 2)
            sum = -1;
        else if (sum >= 0)
            sum += waited;
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return sum;
}

/* Page size of an array: huge pages if it fills at least one. */
static uintptr_t page_of(size_t bytes) { return bytes >= HUGE ? HUGE : (uintptr_t)sysconf(_SC_PAGESIZE); }

/* Allocates memory that ends, up to the alignment, at an inaccessible page. */
static void *guarded(size_t bytes, const char *what, const char *library) {
    uintptr_t page = page_of(bytes), guard = (uintptr_t)sysconf(_SC_PAGESIZE);
    size_t room = (bytes + page - 1) / page * page;
    char *map = mmap(NULL, room + page + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        fail("out of memory: %zu bytes for %s of %s cannot be allocated", bytes, what, library);
    char *start = (char *)(((uintptr_t)map + page - 1) / page * page);
    /* numpy and torch use huge pages, too; with small pages a time depends on which pages are free. An error only
     * means that there are no huge pages. */
    madvise(start, room, MADV_HUGEPAGE);
    mprotect(start + room, guard, PROT_NONE);
    return start + room - (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Makes an array of `guarded` read-only, in full pages, because a split huge page is no longer huge. */
static void protect(char *array, size_t bytes) {
    uintptr_t page = page_of(bytes), start = (uintptr_t)array / page * page;
    if (bytes)
        mprotect((void *)start, (uintptr_t)array + bytes - start, PROT_READ);
}

static void fill(char *array, size_t bytes, int file, const char *library) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(file, array + done, bytes - done, (off_t)done);
        if (got <= 0 && !(got < 0 && errno == EINTR))
            fail("an input of %s cannot be read: %s", library, got ? strerror(errno) : "it is too short");
        done += got > 0 ? (size_t)got : 0;
    }
}

static size_t number(const char *text) { return strtoull(text, NULL, 10); }

/* Loads the kernel that the arguments from `*next` describe, and advances `*next`. */
static Kernel load(char ***next) {
    Kernel kernel = {.library = *(*next)++};
    kernel.output_bytes = number(*(*next)++);
    size_t count = number(*(*next)++);
    void *library = dlopen(kernel.library, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail("it cannot be loaded: %s", dlerror());
    *(void **)&kernel.run = dlsym(library, "sparseflow_kernel");
    if (!kernel.run)
        fail("`sparseflow_kernel` is missing from %s", kernel.library);
    kernel.inputs = calloc(count + 1, sizeof *kernel.inputs);
    if (!kernel.inputs)
        fail("out of memory: %zu pointers cannot be allocated", count);
    for (size_t i = 0; i < count; i++) {
        int file = (int)number(*(*next)++);
        size_t bytes = number(*(*next)++);
        char *array = guarded(bytes, "an input", kernel.library);
        fill(array, bytes, file, kernel.library);
        protect(array, bytes);
        kernel.inputs[i] = array;
    }
    kernel.output = guarded(kernel.output_bytes, "the output", kernel.library);
    memset(kernel.output, 0xFF, kernel.output_bytes);
    return kernel;
}

static void save(const Kernel *kernel, int file) {
    for (size_t done = 0; done < kernel->output_bytes;) {
        ssize_t put =
            pwrite(file, (char *)kernel->output + done, kernel->output_bytes - done, (off_t)done);
        if (put <= 0 && !(put < 0 && errno == EINTR))
            fail("the output cannot be written: %s", strerror(errno));
        done += put > 0 ? (size_t)put : 0;
    }
}

/* Nanoseconds of `calls` calls; at least one, so that ratios are finite. */
static int64_t sample(const Kernel *kernel, int64_t calls) {
    void *outputs[] = {kernel->output};
    int64_t start = now();
    for (int64_t i = 0; i < calls; i++)
        kernel->run(kernel->inputs, outputs);
    int64_t duration = now() - start;
    return duration > 0 ? duration : 1;
}

/* Number of calls that take as long as a sample. */
static int64_t calls_for(const Kernel *kernel, int64_t first_ns) {
    if (first_ns >= LONG_RUN * SAMPLE_NS)
        return 1;
    for (int64_t calls = 1;;) {
        /* An interrupted run or one that wakes threads is too long, so the shortest of several is used. */
        int64_t duration = calls == 1 ? first_ns : sample(kernel, calls), sum = duration;
        for (int repeat = 0; repeat < 1 || (repeat < 8 && sum < LONG_RUN / 10 * SAMPLE_NS); repeat++) {
            int64_t repeated = sample(kernel, calls);
            duration = repeated < duration ? repeated : duration;
            sum += repeated;
        }
        int64_t target = (int64_t)((double)calls * SAMPLE_NS / (double)duration) + 1;
        if (target > MAX_CALLS)
            target = MAX_CALLS;
        if (8 * duration >= SAMPLE_NS || calls == MAX_CALLS)
            return target;
        /* The duration of a short run is inaccurate, so the number of calls grows in steps. */
        calls = target < 16 * calls ? target : 16 * calls;
    }
}

int main(int count, char **arguments) {
    if (count < 13)
        return 2;
    /* Without the parent nothing would stop a kernel that hangs. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if ((size_t)getppid() != number(arguments[8]))
        return 3;
    size_t capacity = number(arguments[6]), memory = number(arguments[7]);
    report = mmap(NULL, sizeof *report + capacity * sizeof report->samples[0], PROT_READ | PROT_WRITE, MAP_SHARED,
                  (int)number(arguments[1]), 0);
    if (report == MAP_FAILED)
        return 4;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (memory)
        setrlimit(RLIMIT_AS, &(struct rlimit){memory, memory});
    /* If the machine runs out of memory, Linux should kill this process and not its parent. */
    int score = open("/proc/self/oom_score_adj", O_WRONLY);
    if (score >= 0) {
        if (write(score, "1000", 4) < 0)
            errno = 0;
        close(score);
    }
    report->cpus = omp_get_num_procs();

    int output = (int)number(arguments[2]);
    int64_t repeats = (int64_t)number(arguments[3]), min_ns = (int64_t)number(arguments[4]),
            max_ns = (int64_t)number(arguments[5]), first_ns[SIDES];
    Kernel kernels[SIDES];
    double slower = strtod(arguments[9], NULL);
    char **next = arguments + 10;
    int sides = 0;
    for (; *next && sides < SIDES; sides++) {
        set_step(LOADING, sides);
        kernels[sides] = load(&next);
    }
    for (int side = sides - 1; side >= 0; side--) {
        set_step(FIRST_RUN, side);
        int limited = side == CANDIDATE && sides > 1 && slower > 0;
        if (limited)
            alarm_in((int64_t)(slower * (double)first_ns[REFERENCE]) + GRACE_NS);
        first_ns[side] = sample(&kernels[side], 1);
        if (limited)
            alarm_in(0);
        if (side == CANDIDATE)
            save(&kernels[side], output);
    }
    for (int side = 0; side < sides; side++) {
        set_step(TIMING, side);
        report->calls[side] = calls_for(&kernels[side], first_ns[side]);
    }

    int64_t threads, waited = waited_now(&threads), cpu = cpu_now(), start = now(), elapsed = 0;
    for (int64_t pair = 0, finished = 0; pair < (int64_t)capacity && !finished; pair++) {
        for (int side = sides - 1; side >= 0; side--) {
            /* A first run that exceeds the maximum time is the only sample. */
            int is_sampled = first_ns[side] >= max_ns;
            set_step(TIMING, side);
            report->samples[pair][side] = is_sampled ? first_ns[side] : sample(&kernels[side], report->calls[side]);
            finished |= is_sampled;
        }
        report->pairs = pair + 1;
        elapsed = now() - start;
        finished |= elapsed >= max_ns || (pair + 1 >= repeats && elapsed >= min_ns);
    }
    report->wall_ns = elapsed;
    report->cpu_ns = cpu_now() - cpu;
    int64_t since = waited_now(&report->threads);
    report->waited_ns = since < 0 || waited < 0 ? -1 : since > waited ? since - waited : 0;
    set_step(DONE, 0);
    /* Skips the exit handlers of the kernels' libraries. */
    _exit(0);
}
