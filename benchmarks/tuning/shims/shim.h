/* A library's sparse product as a kernel of the runner. A shim follows this file and defines `prepare`, which is
   called once before the first call and is not part of its time, and `multiply`, which overwrites c.

   Macros: REAL (float or double), DOUBLE (0 or 1), LIBRARY (path of a library that is loaded at run time).
   Inputs of the kernel: int64 [rows, cols, elements or blocks, columns of B or 0, threads, form], row offsets, columns
   and values, B or x. The output has one row more than the result; it starts with the seconds of `prepare`. */
#include <dlfcn.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rows, cols, nnz, n_cols, threads, form;
static double prepare_start; /* a shim may add the seconds that its `prepare` spends on something else */

static void prepare(const int *offsets, const int *indices, const REAL *values, const REAL *b, REAL *c);
static void multiply(const REAL *b, REAL *c);

__attribute__((unused)) static void *symbol(const char *name)
{
#ifdef LIBRARY
    static void *library;
    if (!library && !(library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL))) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    void *address = dlsym(library, name);
    if (!address) {
        fprintf(stderr, "%s is missing from %s\n", name, LIBRARY);
        abort();
    }
    return address;
#else
    (void)name;
    abort();
#endif
}

__attribute__((unused)) static void must(int status, const char *call)
{
    if (status) {
        fprintf(stderr, "%s returns %d\n", call, status);
        abort();
    }
}

#ifdef __cplusplus
extern "C" {
#endif

void sparseflow_prepare(const void *const *in, void *const *out)
{
    const int64_t *sizes = (const int64_t *)in[0];
    REAL *c = (REAL *)out[0];
    rows = (int)sizes[0], cols = (int)sizes[1], nnz = (int)sizes[2];
    n_cols = (int)sizes[3], threads = (int)sizes[4], form = (int)sizes[5];
    prepare_start = omp_get_wtime();
    omp_set_num_threads(threads);
    prepare((const int *)in[1], (const int *)in[2], (const REAL *)in[3], (const REAL *)in[4], c);
    c[(size_t)rows * (size_t)(n_cols ? n_cols : 1)] = (REAL)(omp_get_wtime() - prepare_start);
}

void sparseflow_kernel(const void *const *in, void *const *out)
{
    multiply((const REAL *)in[4], (REAL *)out[0]);
}

#ifdef __cplusplus
}
#endif
