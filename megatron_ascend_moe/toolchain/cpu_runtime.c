/* What kernels lowered for the CPU call: records of their accesses to global memory (see instrument.py) and the
 * strided copy that LLVM's MLIR expects of its runtime. One process runs one kernel at a time. */
#include <stdint.h>
#include <string.h>

enum { ARGUMENTS = 64, KINDS = 4 };

int64_t access_limits[ARGUMENTS];          /* elements of each argument, set before a launch */
int64_t access_elements[ARGUMENTS][KINDS]; /* elements touched */
int64_t access_count[ARGUMENTS][KINDS];    /* accesses, empty ones left out */
int64_t access_fault[4];                   /* 1 + argument, kind, first and last element of the first fault */

void record_access(int64_t argument, int64_t kind, int64_t offset, int64_t rows, int64_t row_stride,
                   int64_t columns, int64_t column_stride) {
  if (rows <= 0 || columns <= 0) return;
  int64_t last = offset + (rows - 1) * row_stride + (columns - 1) * column_stride;
  if ((offset < 0 || last >= access_limits[argument]) && !access_fault[0]) {
    access_fault[0] = 1 + argument;
    access_fault[1] = kind;
    access_fault[2] = offset;
    access_fault[3] = last;
  }
  access_elements[argument][kind] += rows * columns;
  access_count[argument][kind] += 1;
}

typedef struct {
  char *allocated, *aligned;
  int64_t offset;
  int64_t sizes_then_strides[];
} Memref;

typedef struct {
  int64_t rank;
  Memref *memref;
} UnrankedMemref;

static void copy_axis(int64_t nbytes, int64_t rank, const int64_t *sizes, const char *from,
                      const int64_t *from_strides, char *to, const int64_t *to_strides) {
  if (rank == 0) {
    memcpy(to, from, nbytes);
    return;
  }
  for (int64_t i = 0; i < sizes[0]; i++)
    copy_axis(nbytes, rank - 1, sizes + 1, from + i * from_strides[0] * nbytes, from_strides + 1,
              to + i * to_strides[0] * nbytes, to_strides + 1);
}

/* The name and signature are LLVM's. */
void memrefCopy(int64_t nbytes, UnrankedMemref *from, UnrankedMemref *to) {
  int64_t rank = from->rank;
  Memref *f = from->memref, *t = to->memref;
  copy_axis(nbytes, rank, f->sizes_then_strides, f->aligned + f->offset * nbytes, f->sizes_then_strides + rank,
            t->aligned + t->offset * nbytes, t->sizes_then_strides + rank);
}
