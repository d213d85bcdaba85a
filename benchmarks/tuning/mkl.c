/* Intel MKL's sparse product as a kernel of the runner; MKL is loaded at run time from LIBRARY.

   Macros: LIBRARY (path of libmkl_rt), REAL (float or double), CREATE, MM and MV (names of the functions for REAL),
   ROWS, COLS, N_COLS (0 for a vector), THREADS. The inspector runs in the first call, which is not timed, with a
   hint of many later calls. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct description {
    int type, mode, diag;
};

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "MKL has no %s\n", name);
        abort();
    }
    return found;
}

static void must(int status, const char *what)
{
    if (status) {
        fprintf(stderr, "%s gives %d\n", what, status);
        abort();
    }
}

enum { GENERAL = 20, NOT_TRANSPOSED = 10, ROW_MAJOR = 101, GNU = 3, LP64 = 0, CALLS = 10000 };

typedef int create(void **, int, int, int, int *, int *, int *, REAL *);
typedef int mm(int, REAL, void *, struct description, int, const REAL *, int, int, REAL, REAL *, int);
typedef int mv(int, REAL, void *, struct description, const REAL *, REAL, REAL *);

static void *handle;
static mm *run_mm;
static mv *run_mv;

static void prepare(const void *const *in)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    ((int (*)(int))symbol(library, "MKL_Set_Threading_Layer"))(GNU);
    ((int (*)(int))symbol(library, "MKL_Set_Interface_Layer"))(LP64);
    ((void (*)(int))symbol(library, "MKL_Set_Num_Threads"))(THREADS);
    run_mm = symbol(library, MM);
    run_mv = symbol(library, MV);
    int *pos = (int *)in[0];
    must(((create *)symbol(library, CREATE))(&handle, 0, ROWS, COLS, pos, pos + 1, (int *)in[1], (REAL *)in[2]),
         "creating");
    struct description general = {GENERAL, 0, 0};
    if (N_COLS)
        must(((int (*)(void *, int, struct description, int, int, int))symbol(library, "mkl_sparse_set_mm_hint"))(
                 handle, NOT_TRANSPOSED, general, ROW_MAJOR, N_COLS, CALLS),
             "hinting");
    else
        must(((int (*)(void *, int, struct description, int))symbol(library, "mkl_sparse_set_mv_hint"))(
                 handle, NOT_TRANSPOSED, general, CALLS),
             "hinting");
    must(((int (*)(void *))symbol(library, "mkl_sparse_optimize"))(handle), "optimising");
}

void sparseflow_kernel(const void *const *in, void *const *out)
{
    if (!handle)
        prepare(in);
    struct description general = {GENERAL, 0, 0};
    if (N_COLS)
        must(run_mm(NOT_TRANSPOSED, 1, handle, general, ROW_MAJOR, in[3], N_COLS, N_COLS, 0, out[0], N_COLS), "mm");
    else
        must(run_mv(NOT_TRANSPOSED, 1, handle, general, in[3], 0, out[0]), "mv");
}
