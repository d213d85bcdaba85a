/* Eigen: a row-major sparse matrix times a row-major dense matrix or a vector. */
#include <Eigen/Sparse>

using Sparse = Eigen::SparseMatrix<REAL, Eigen::RowMajor, int>;
using Dense = Eigen::Matrix<REAL, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::Matrix<REAL, Eigen::Dynamic, 1>;

static const Eigen::Map<const Sparse> *matrix;

static void prepare(const int *offsets, const int *indices, const REAL *values, const REAL *, REAL *)
{
    Eigen::setNbThreads(threads);
    matrix = new Eigen::Map<const Sparse>(rows, cols, nnz, offsets, indices, values);
}

static void multiply(const REAL *b, REAL *c)
{
    if (n_cols)
        Eigen::Map<Dense>(c, rows, n_cols).noalias() = *matrix * Eigen::Map<const Dense>(b, cols, n_cols);
    else
        Eigen::Map<Vector>(c, rows).noalias() = *matrix * Eigen::Map<const Vector>(b, cols);
}
