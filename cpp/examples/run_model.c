/* Runs a frozen GRU step by step over zeros: run_model FILE [STEPS]. */
#include <stdio.h>
#include <stdlib.h>

#include "quant_gru/quant_gru.h"

static void check(qgru_status status) {
    if (status == QGRU_OK) return;
    fprintf(stderr, "%s\n", qgru_last_error());
    exit(1);
}

int main(int count, char **arguments) {
    qgru_model *model;
    qgru_stream *stream;
    qgru_shape shape;
    if (count < 2 || count > 3) {
        fprintf(stderr,
                "usage: %s FILE [STEPS]\n"
                "  FILE   a frozen GRU of one direction: gru.freeze().save(FILE) in Python, or\n"
                "         gru_example --save FILE\n"
                "  STEPS  how many steps of zeros to run (1)\n",
                arguments[0]);
        return 2;
    }
    check(qgru_load(arguments[1], &model));
    check(qgru_get_shape(model, &shape));
    check(qgru_new_stream(model, 1, &stream));
    float *x = calloc((size_t)shape.input_size, sizeof *x);
    float *y = calloc((size_t)shape.hidden_size, sizeof *y);
    for (int step = count > 2 ? atoi(arguments[2]) : 1; x && y && step > 0; --step)
        check(qgru_step(stream, x, y));
    for (int64_t i = 0; y && i < shape.hidden_size; ++i) printf("%g\n", y[i]);
    free(x);
    free(y);
    qgru_free_stream(stream);
    qgru_free_model(model);
    return 0;
}
