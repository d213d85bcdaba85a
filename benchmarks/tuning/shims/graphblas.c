/* SuiteSparse:GraphBLAS with the semiring PLUS_TIMES. A is sparse by row, B and C are full by row, so that the
   library runs its kernels for dense operands. Form 0 sets C to 0 and accumulates A B in it; form 1 assigns A B.
   B and C stay in the library's objects; `prepare` copies the result of an
   extra product to c. */

typedef void *object;
typedef int assign(object, object, object, REAL, const uint64_t *, uint64_t, const uint64_t *, uint64_t, object);
typedef int assign_vector(object, object, object, REAL, const uint64_t *, uint64_t, object);
typedef int product(object, object, object, object, object, object, object);

enum { NONBLOCKING = 0, CSR = 0, MATERIALIZE = 1 };

#define NAME(function, type) "GrB_" function "_FP" type
#define TYPED(function) symbol(DOUBLE ? NAME(function, "64") : NAME(function, "32"))
#define VALUE(name) (*(object *)symbol(name))

static object a, operand, result, semiring, plus;
static const uint64_t *all;
static product *run;
static assign *set_matrix;
static assign_vector *set_vector;
static int (*wait_for)(object, int);

/* Full by row; the library owns the copy. */
static object make_full(object type, int height, const REAL *values)
{
    size_t bytes = sizeof(REAL) * (size_t)height * (size_t)(n_cols ? n_cols : 1);
    void *copy = malloc(bytes);
    memcpy(copy, values, bytes);
    object full;
    if (n_cols) {
        must(((int (*)(object *, object, uint64_t, uint64_t))symbol("GrB_Matrix_new"))(&full, type, (uint64_t)height,
                                                                                      (uint64_t)n_cols),
             "Matrix_new");
        must(((int (*)(object, void **, uint64_t, _Bool, object))symbol("GxB_Matrix_pack_FullR"))(full, &copy, bytes,
                                                                                                 0, NULL),
             "pack_FullR");
    } else {
        must(((int (*)(object *, object, uint64_t))symbol("GrB_Vector_new"))(&full, type, (uint64_t)height),
             "Vector_new");
        must(((int (*)(object, void **, uint64_t, _Bool, object))symbol("GxB_Vector_pack_Full"))(full, &copy, bytes, 0,
                                                                                                NULL),
             "pack_Full");
    }
    return full;
}

static void copy_result(REAL *c)
{
    uint64_t count = (uint64_t)rows * (uint64_t)(n_cols ? n_cols : 1);
    uint64_t *i = malloc(sizeof *i * count), *j = malloc(sizeof *j * count);
    REAL *x = malloc(sizeof *x * count);
    if (n_cols)
        must(((int (*)(uint64_t *, uint64_t *, REAL *, uint64_t *, object))TYPED("Matrix_extractTuples"))(
                 i, j, x, &count, result),
             "extractTuples");
    else
        must(((int (*)(uint64_t *, REAL *, uint64_t *, object))TYPED("Vector_extractTuples"))(i, x, &count, result),
             "extractTuples");
    memset(c, 0, sizeof *c * (size_t)rows * (size_t)(n_cols ? n_cols : 1));
    for (uint64_t k = 0; k < count; k++)
        c[n_cols ? i[k] * (uint64_t)n_cols + j[k] : i[k]] = x[k];
    free(i), free(j), free(x);
}

static void prepare(const int *offsets, const int *indices, const REAL *values, const REAL *b, REAL *c)
{
    must(((int (*)(int))symbol("GrB_init"))(NONBLOCKING), "init");
    object type = DOUBLE ? VALUE("GrB_FP64") : VALUE("GrB_FP32");
    plus = DOUBLE ? VALUE("GrB_PLUS_FP64") : VALUE("GrB_PLUS_FP32");
    semiring = DOUBLE ? VALUE("GrB_PLUS_TIMES_SEMIRING_FP64") : VALUE("GrB_PLUS_TIMES_SEMIRING_FP32");
    all = VALUE("GrB_ALL");
    run = symbol(n_cols ? "GrB_mxm" : "GrB_mxv");
    set_matrix = TYPED("Matrix_assign");
    set_vector = TYPED("Vector_assign");
    wait_for = symbol(n_cols ? "GrB_Matrix_wait" : "GrB_Vector_wait");
    uint64_t *starts = malloc(sizeof *starts * (size_t)(rows + 1)), *wide = malloc(sizeof *wide * (size_t)nnz);
    for (int i = 0; i <= rows; i++)
        starts[i] = (uint64_t)offsets[i];
    for (int i = 0; i < nnz; i++)
        wide[i] = (uint64_t)indices[i];
    typedef int import(object *, object, uint64_t, uint64_t, const uint64_t *, const uint64_t *, const REAL *,
                       uint64_t, uint64_t, uint64_t, int);
    must(((import *)TYPED("Matrix_import"))(&a, type, (uint64_t)rows, (uint64_t)cols, starts, wide, values,
                                            (uint64_t)rows + 1, (uint64_t)nnz, (uint64_t)nnz, CSR),
         "Matrix_import");
    free(starts);
    free(wide);
    operand = make_full(type, cols, b);
    result = make_full(type, rows, c);
    double start = omp_get_wtime();
    multiply(b, c);
    copy_result(c);
    prepare_start += omp_get_wtime() - start;
}

static void multiply(const REAL *b, REAL *c)
{
    (void)b, (void)c;
    if (form == 0 && n_cols)
        must(set_matrix(result, NULL, NULL, 0, all, (uint64_t)rows, all, (uint64_t)n_cols, NULL), "assign");
    else if (form == 0)
        must(set_vector(result, NULL, NULL, 0, all, (uint64_t)rows, NULL), "assign");
    must(run(result, NULL, form == 0 ? plus : NULL, semiring, a, operand, NULL), "product");
    must(wait_for(result, MATERIALIZE), "wait");
}
