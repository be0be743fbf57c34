/* The C interface from C: every function, and its errors. c_api_test MODEL of one direction. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant_gru/quant_gru.h"

static int failures = 0;

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            printf("%s:%d: expected %s; last error: %s\n", __FILE__, __LINE__, #condition, \
                   qgru_last_error());                                                     \
            ++failures;                                                                    \
        }                                                                                  \
    } while (0)

static char *bytes_of(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(1 << 22);
    *size = file && bytes ? fread(bytes, 1, 1 << 22, file) : 0;
    if (file) fclose(file);
    return bytes;
}

static void test_errors(const qgru_model *model) {
    qgru_model *other = NULL;
    qgru_stream *stream = NULL;
    qgru_options options;
    float value = 0;
    CHECK(qgru_load("/nowhere", &other) == QGRU_FILE && !other);
    CHECK(strstr(qgru_last_error(), "Expected a readable file") != NULL);
    CHECK(qgru_load_bytes("x", 1, &other) == QGRU_FILE && !other);
    CHECK(qgru_load(NULL, &other) == QGRU_ARGUMENT);
    CHECK(strcmp(qgru_last_error(), "Expected the address of path, got null") == 0);
    CHECK(qgru_run(NULL, &value, 1, 1, &value, NULL) == QGRU_ARGUMENT);
    CHECK(qgru_run(model, NULL, 1, 1, &value, NULL) == QGRU_ARGUMENT);
    CHECK(qgru_run(model, &value, 0, 1, &value, NULL) == QGRU_ARGUMENT);
    CHECK(qgru_new_stream(model, 0, &stream) == QGRU_ARGUMENT && !stream);
    CHECK(qgru_step(NULL, &value, &value) == QGRU_ARGUMENT);
    CHECK(qgru_reset(NULL) == QGRU_ARGUMENT);
    memset(&options, 0, sizeof options);
    CHECK(qgru_run(model, &value, 1, 1, &value, &options) == QGRU_ARGUMENT);
    CHECK(strstr(qgru_last_error(), "Expected options.size to be at least") != NULL);
    options.size = sizeof options;
    options.threads = -1;
    CHECK(qgru_run(model, &value, 1, 1, &value, &options) == QGRU_ARGUMENT);
    qgru_free_model(NULL);
    qgru_free_stream(NULL);
}

/* With a GPU, or its stand-in, a call is prepared; otherwise the error says what is missing. */
static void test_gpu(const char *path) {
    qgru_cuda_model *model = NULL;
    qgru_cuda_call *call = NULL;
    qgru_cuda_options options;
    qgru_shape shape;
    const qgru_status status = qgru_cuda_load(path, 0, &model);
    CHECK(qgru_cuda_load(NULL, 0, &model) == QGRU_ARGUMENT);
    CHECK(qgru_cuda_prepare(NULL, 1, 1, &call) == QGRU_ARGUMENT);
    CHECK(qgru_cuda_run(NULL, NULL, NULL, NULL) == QGRU_ARGUMENT);
    if (status != QGRU_OK) {
        CHECK(status == QGRU_DEVICE);
        CHECK(qgru_cuda_load(path, 0, &model) == QGRU_DEVICE);
        CHECK(strncmp(qgru_last_error(), "Expected ", 9) == 0);
        return;
    }
    CHECK(qgru_cuda_get_shape(model, &shape) == QGRU_OK && shape.directions == 1);
    CHECK(qgru_cuda_prepare(model, 0, 1, &call) == QGRU_ARGUMENT);
    CHECK(qgru_cuda_prepare(model, 3, 2, &call) == QGRU_OK);
    qgru_cuda_free_model(model); /* the call keeps its memory */
    CHECK(strstr(qgru_cuda_description(call), "recurrence/persistent") != NULL);
    memset(&options, 0, sizeof options);
    options.size = sizeof options - 1;
    CHECK(qgru_cuda_run(call, NULL, NULL, &options) == QGRU_ARGUMENT);
    CHECK(strstr(qgru_last_error(), "options.size") != NULL);
    CHECK(qgru_cuda_run(call, NULL, NULL, NULL) == QGRU_ARGUMENT);
    qgru_cuda_free_call(call);
}

int main(int count, char **arguments) {
    qgru_model *model = NULL, *copy = NULL;
    qgru_stream *stream = NULL;
    qgru_shape shape;
    qgru_options options;
    size_t size, H, C;
    char *bytes;
    if (count < 2) return 2;
    CHECK(qgru_version() == QGRU_VERSION);
    CHECK(strcmp(qgru_last_error(), "") == 0);
    CHECK(qgru_load(arguments[1], &model) == QGRU_OK);
    bytes = bytes_of(arguments[1], &size);
    CHECK(qgru_load_bytes(bytes, size, &copy) == QGRU_OK);
    free(bytes);
    if (failures) return 1;
    CHECK(qgru_get_shape(model, &shape) == QGRU_OK && shape.directions == 1);
    C = (size_t)shape.input_size;
    H = (size_t)shape.hidden_size;
    {
        float *x = calloc(2 * C, sizeof *x), *y = calloc(2 * H, sizeof *y);
        float *h = calloc((size_t)shape.num_layers * H, sizeof *h), *z = calloc(2 * H, sizeof *z);
        memset(&options, 0, sizeof options);
        options.size = sizeof options;
        options.h_n = h;
        /* two steps of one sequence, whole and step by step */
        x[0] = 0.5f;
        CHECK(qgru_run(model, x, 2, 1, y, &options) == QGRU_OK);
        CHECK(memcmp(h + ((size_t)shape.num_layers - 1) * H, y + H, H * sizeof *y) == 0);
        CHECK(qgru_new_stream(copy, 1, &stream) == QGRU_OK);
        qgru_free_model(copy); /* the stream keeps its memory */
        CHECK(qgru_step(stream, x + C, z) == QGRU_OK);
        CHECK(qgru_reset(stream) == QGRU_OK);
        CHECK(qgru_step(stream, x, z) == QGRU_OK);
        CHECK(qgru_step(stream, x + C, z + H) == QGRU_OK);
        CHECK(memcmp(y, z, 2 * H * sizeof *y) == 0);
        qgru_free_stream(stream);
        free(x);
        free(y);
        free(h);
        free(z);
    }
    test_errors(model);
    test_gpu(arguments[1]);
    qgru_free_model(model);
    return failures != 0;
}
