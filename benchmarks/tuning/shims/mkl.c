/* Intel MKL, inspector-executor interface: CSR (form 1) or BSR with blocks of `form` rows and columns. The inspector
   gets a hint of many calls. The threads are those of GNU OpenMP, as the kernel's. */

struct description {
    int type, mode, diag;
};

enum { GENERAL = 20, NOT_TRANSPOSED = 10, ROW_MAJOR = 101, GNU = 3, LP64 = 0, CALLS = 10000 };

#define NAME(letter, function) "mkl_sparse_" letter "_" function
#define TYPED(function) symbol(DOUBLE ? NAME("d", function) : NAME("s", function))

typedef int create_csr(void **, int, int, int, int *, int *, int *, REAL *);
typedef int create_bsr(void **, int, int, int, int, int, int *, int *, int *, REAL *);
typedef int mm_hint(void *, int, struct description, int, int, int);
typedef int mv_hint(void *, int, struct description, int);
typedef int mm(int, REAL, void *, struct description, int, const REAL *, int, int, REAL, REAL *, int);
typedef int mv(int, REAL, void *, struct description, const REAL *, REAL, REAL *);

static const struct description general = {GENERAL, 0, 0};
static void *matrix;
static mm *run_mm;
static mv *run_mv;

static void prepare(const int *offsets, const int *indices, const REAL *values, const REAL *b, REAL *c)
{
    (void)b, (void)c, (void)cols, (void)nnz;
    ((int (*)(int))symbol("MKL_Set_Threading_Layer"))(GNU);
    ((int (*)(int))symbol("MKL_Set_Interface_Layer"))(LP64);
    ((void (*)(int))symbol("MKL_Set_Num_Threads"))(threads);
    run_mm = TYPED("mm");
    run_mv = TYPED("mv");
    int *starts = (int *)offsets, *columns = (int *)indices;
    REAL *elements = (REAL *)values;
    if (form > 1)
        must(((create_bsr *)TYPED("create_bsr"))(&matrix, 0, ROW_MAJOR, rows / form, cols / form, form, starts,
                                                 starts + 1, columns, elements),
             "create_bsr");
    else
        must(((create_csr *)TYPED("create_csr"))(&matrix, 0, rows, cols, starts, starts + 1, columns, elements),
             "create_csr");
    if (n_cols)
        must(((mm_hint *)symbol("mkl_sparse_set_mm_hint"))(matrix, NOT_TRANSPOSED, general, ROW_MAJOR, n_cols, CALLS),
             "set_mm_hint");
    else
        must(((mv_hint *)symbol("mkl_sparse_set_mv_hint"))(matrix, NOT_TRANSPOSED, general, CALLS), "set_mv_hint");
    must(((int (*)(void *))symbol("mkl_sparse_optimize"))(matrix), "optimize");
}

static void multiply(const REAL *b, REAL *c)
{
    if (n_cols)
        must(run_mm(NOT_TRANSPOSED, 1, matrix, general, ROW_MAJOR, b, n_cols, n_cols, 0, c, n_cols), "mm");
    else
        must(run_mv(NOT_TRANSPOSED, 1, matrix, general, b, 0, c), "mv");
}
