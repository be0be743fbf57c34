/* The C interface of quant-gru: frozen GRUs over handles.
 *
 * Functions return QGRU_OK or the kind of an error; qgru_last_error describes the last error of the
 * calling thread. No exception leaves a function. Functions of this file never change their
 * meaning; later versions only add to them.
 */
#ifndef QUANT_GRU_H
#define QUANT_GRU_H

#include <stddef.h>
#include <stdint.h>

#include "quant_gru/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface: what a program needs, see qgru_version. */
#define QGRU_VERSION 2

typedef enum {
    QGRU_OK = 0,
    QGRU_ARGUMENT = 1, /* an argument breaks a rule */
    QGRU_FILE = 2,     /* a file cannot be read, or a part of it is wrong */
    QGRU_MEMORY = 3,   /* the system has too little memory */
    QGRU_INTERNAL = 4, /* anything else */
    QGRU_DEVICE = 5    /* a GPU, its driver or NVRTC is missing or fails */
} qgru_status;

typedef struct qgru_model qgru_model;
typedef struct qgru_stream qgru_stream;

typedef struct {
    int64_t input_size;  /* C */
    int64_t hidden_size; /* H */
    int64_t num_layers;
    int64_t directions;  /* D: 1 or 2 */
    int64_t batch_first; /* 1 if x is (N, T, C), 0 if it is (T, N, C) */
} qgru_shape;

/* Optional arguments of qgru_run. Set all to 0, then `size` to sizeof(qgru_options). */
typedef struct {
    size_t size;
    const float *h0;        /* (num_layers * D, N, H), or null for zeros */
    float *h_n;             /* receives the last states, same shape; or null */
    const int64_t *lengths; /* (N), steps of each sequence, 0..T; or null if all have T */
    int64_t threads;        /* at most so many; 0 for one per processor */
} qgru_options;

/* The version of the library; it serves all programs of this and of smaller QGRU_VERSION. */
QUANT_GRU_API int qgru_version(void);

/* The message of the last error in this thread, "" if there was none. Valid until the next error.
 */
QUANT_GRU_API const char *qgru_last_error(void);

/* Loads a file of FrozenQuantGRU.save, or its bytes. qgru_free_model releases the model. */
QUANT_GRU_API qgru_status qgru_load(const char *path, qgru_model **model);
QUANT_GRU_API qgru_status qgru_load_bytes(const void *bytes, size_t size, qgru_model **model);
QUANT_GRU_API void qgru_free_model(qgru_model *model);

QUANT_GRU_API qgru_status qgru_get_shape(const qgru_model *model, qgru_shape *shape);

/* Runs T steps of N sequences, from x (T, N, C) to y (T, N, D * H); with batch_first from
 * x (N, T, C) to y (N, T, D * H). `options` may be null. Several threads may run one model. */
QUANT_GRU_API qgru_status qgru_run(const qgru_model *model, const float *x, int64_t T, int64_t N,
                                   float *y, const qgru_options *options);

/* A stream of N sequences in the zero state; it keeps its model alive. Only for one direction. */
QUANT_GRU_API qgru_status qgru_new_stream(const qgru_model *model, int64_t N, qgru_stream **stream);
QUANT_GRU_API void qgru_free_stream(qgru_stream *stream);

/* One step from x (N, C) to y (N, H). It allocates no memory and takes no lock. A stream must not
 * run in two threads at once. */
QUANT_GRU_API qgru_status qgru_step(qgru_stream *stream, const float *x, float *y);

/* Restores the zero state. */
QUANT_GRU_API qgru_status qgru_reset(qgru_stream *stream);

/* GPUs, from version 2 on; quant_gru/cuda.hpp describes them. Without a GPU, or in a library built
 * without -DQUANT_GRU_CUDA=ON, they return QGRU_DEVICE. */
typedef struct qgru_cuda_model qgru_cuda_model;
typedef struct qgru_cuda_call qgru_cuda_call;

/* Optional arguments of qgru_cuda_run, all in memory of the GPU. Set all to 0, then `size` to
 * sizeof(qgru_cuda_options). */
typedef struct {
    size_t size;
    void *stream;           /* a CUstream or cudaStream_t; null for the default stream */
    const float *h0;        /* (num_layers * D, N, H), or null for zeros */
    float *h_n;             /* receives the last states, same shape, may be h0; or null */
    const int64_t *lengths; /* (N), steps of each sequence, 1..T; or null if all have T */
} qgru_cuda_options;

/* Loads a file, or its bytes, to the GPU of an index. qgru_cuda_free_model releases the model. */
QUANT_GRU_API qgru_status qgru_cuda_load(const char *path, int device, qgru_cuda_model **model);
QUANT_GRU_API qgru_status qgru_cuda_load_bytes(const void *bytes, size_t size, int device,
                                               qgru_cuda_model **model);
QUANT_GRU_API void qgru_cuda_free_model(qgru_cuda_model *model);
QUANT_GRU_API qgru_status qgru_cuda_get_shape(const qgru_cuda_model *model, qgru_shape *shape);

/* Prepares calls with T steps of N sequences: kernels and workspace. The call keeps its model
 * alive. */
QUANT_GRU_API qgru_status qgru_cuda_prepare(const qgru_cuda_model *model, int64_t T, int64_t N,
                                            qgru_cuda_call **call);
QUANT_GRU_API void qgru_cuda_free_call(qgru_cuda_call *call);

/* One line per launch, for people. Valid until the call is released. */
QUANT_GRU_API const char *qgru_cuda_description(const qgru_cuda_call *call);

/* Starts a call on a stream; x and y as in qgru_run, in memory of the GPU. It only launches
 * kernels, so a stream that is captured into a CUDA graph may run it. `options` may be null. */
QUANT_GRU_API qgru_status qgru_cuda_run(const qgru_cuda_call *call, const float *x, float *y,
                                        const qgru_cuda_options *options);

#ifdef __cplusplus
}
#endif

#endif
