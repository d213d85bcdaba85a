/* librsb: recursive sparse blocks; `rsb_tune_spmm` selects the blocks and the number of threads. */

enum { NO_FLAGS = 0, ROW_MAJOR = 0, NOT_TRANSPOSED = 'N', EXECUTING_THREADS = 9 };

static void *matrix;
static int (*run_mm)(int, const void *, const void *, int, int, const void *, int, const void *, void *, int);
static int (*run_mv)(int, const void *, const void *, const void *, int, const void *, void *, int);
static const REAL one = 1, zero = 0;

static void prepare(const int *offsets, const int *indices, const REAL *values, const REAL *b, REAL *c)
{
    int error = 0, best_threads = threads, nrhs = n_cols ? n_cols : 1;
    int (*set)(int, const void *) = (int (*)(int, const void *))symbol("rsb_lib_set_opt");
    must(((int (*)(void *))symbol("rsb_lib_init"))(NULL), "rsb_lib_init");
    must(set(EXECUTING_THREADS, &threads), "rsb_lib_set_opt");
    typedef void *allocate(const void *, const int *, const int *, int, char, int, int, int, int, int, int *);
    matrix = ((allocate *)symbol("rsb_mtx_alloc_from_csr_const"))(values, offsets, indices, nnz, DOUBLE ? 'D' : 'S',
                                                                  rows, cols, 1, 1, NO_FLAGS, &error);
    must(error, "rsb_mtx_alloc_from_csr_const");
    typedef int tune(void **, double *, int *, int, double, int, const void *, const void *, int, int, const void *,
                     int, const void *, void *, int);
    memset(c, 0, sizeof(REAL) * (size_t)rows * (size_t)nrhs);
    must(((tune *)symbol("rsb_tune_spmm"))(&matrix, NULL, &best_threads, 0, 0.0, NOT_TRANSPOSED, &one, NULL, nrhs,
                                           ROW_MAJOR, b, nrhs, &zero, c, nrhs),
         "rsb_tune_spmm");
    if (best_threads > 0 && best_threads < threads)
        must(set(EXECUTING_THREADS, &best_threads), "rsb_lib_set_opt");
    *(void **)&run_mm = symbol("rsb_spmm");
    *(void **)&run_mv = symbol("rsb_spmv");
}

static void multiply(const REAL *b, REAL *c)
{
    if (n_cols)
        must(run_mm(NOT_TRANSPOSED, &one, matrix, n_cols, ROW_MAJOR, b, n_cols, &zero, c, n_cols), "rsb_spmm");
    else
        must(run_mv(NOT_TRANSPOSED, &one, matrix, b, 1, &zero, c, 1), "rsb_spmv");
}
