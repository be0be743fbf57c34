#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "quant_gru/cuda.hpp"
#include "quant_gru/model.hpp"
#include "quant_gru/quant_gru.h"

struct qgru_model {
    quant_gru::Model model;
};

struct qgru_stream {
    quant_gru::Stream stream;
};

struct qgru_cuda_model {
    quant_gru::cuda::Model model;
};

struct qgru_cuda_call {
    quant_gru::cuda::Call call;
    std::string description;
};

namespace {

thread_local char last_error[512];

qgru_status report(qgru_status status, const char *message) {
    std::snprintf(last_error, sizeof last_error, "%s", message);
    return status;
}

// The status of the exception that is being handled. One function for all, since each handler
// takes room.
qgru_status report_exception() noexcept {
    try {
        throw;
    } catch (const quant_gru::ArgumentError &error) {
        return report(QGRU_ARGUMENT, error.what());
    } catch (const quant_gru::FileError &error) {
        return report(QGRU_FILE, error.what());
    } catch (const quant_gru::cuda::DeviceError &error) {
        return report(QGRU_DEVICE, error.what());
    } catch (const std::bad_alloc &) {
        return report(QGRU_MEMORY, "Expected enough memory, got none");
    } catch (const std::exception &error) {
        return report(QGRU_INTERNAL, error.what());
    } catch (...) {
        return report(QGRU_INTERNAL, "Expected no other error, got one");
    }
}

// Calls f and converts its exceptions to a status.
template <class F>
qgru_status guarded(F f) noexcept {
    try {
        f();
        return QGRU_OK;
    } catch (...) {
        return report_exception();
    }
}

void require(const void *address, const char *name) {
    if (!address)
        throw quant_gru::ArgumentError(std::string("Expected the address of ") + name +
                                       ", got null");
}

// Copies the part of a caller's options that this version knows; later versions have longer
// structs.
void copy_options(const void *given, size_t size, void *to, size_t known) {
    if (size < known)
        throw quant_gru::ArgumentError("Expected options.size to be at least " +
                                       std::to_string(known) + ", got " + std::to_string(size));
    std::memcpy(to, given, known);
}

qgru_shape shape_of(const quant_gru::Shape &s) {
    return {s.input_size, s.hidden_size, s.num_layers, s.directions, s.batch_first};
}

quant_gru::RunOptions options_of(const qgru_options *given) {
    quant_gru::RunOptions options;
    if (!given) return options;
    qgru_options all;
    copy_options(given, given->size, &all, sizeof all);
    if (all.threads < 0 || all.threads > 1 << 16)
        throw quant_gru::ArgumentError("Expected threads to be in [0, 65536], got " +
                                       std::to_string(all.threads));
    options.h0 = all.h0;
    options.h_n = all.h_n;
    options.lengths = all.lengths;
    options.threads = static_cast<int>(all.threads);
    return options;
}

}  // namespace

int qgru_version(void) { return QGRU_VERSION; }

const char *qgru_last_error(void) { return last_error; }

qgru_status qgru_load(const char *path, qgru_model **model) {
    return guarded([&] {
        require(path, "path");
        require(model, "model");
        *model = new qgru_model{quant_gru::Model::load(path)};
    });
}

qgru_status qgru_load_bytes(const void *bytes, size_t size, qgru_model **model) {
    return guarded([&] {
        require(bytes, "bytes");
        require(model, "model");
        *model = new qgru_model{quant_gru::Model::load(bytes, size)};
    });
}

void qgru_free_model(qgru_model *model) { delete model; }

qgru_status qgru_get_shape(const qgru_model *model, qgru_shape *shape) {
    return guarded([&] {
        require(model, "model");
        require(shape, "shape");
        *shape = shape_of(model->model.shape());
    });
}

qgru_status qgru_run(const qgru_model *model, const float *x, int64_t T, int64_t N, float *y,
                     const qgru_options *options) {
    return guarded([&] {
        require(model, "model");
        model->model.run(x, T, N, y, options_of(options));
    });
}

qgru_status qgru_new_stream(const qgru_model *model, int64_t N, qgru_stream **stream) {
    return guarded([&] {
        require(model, "model");
        require(stream, "stream");
        *stream = new qgru_stream{model->model.stream(N)};
    });
}

void qgru_free_stream(qgru_stream *stream) { delete stream; }

qgru_status qgru_step(qgru_stream *stream, const float *x, float *y) {
    return guarded([&] {
        require(stream, "stream");
        require(x, "x");
        require(y, "y");
        stream->stream.step(x, y);
    });
}

qgru_status qgru_reset(qgru_stream *stream) {
    return guarded([&] {
        require(stream, "stream");
        stream->stream.reset();
    });
}

qgru_status qgru_cuda_load(const char *path, int device, qgru_cuda_model **model) {
    return guarded([&] {
        require(path, "path");
        require(model, "model");
        *model = new qgru_cuda_model{quant_gru::cuda::Model::load(path, device)};
    });
}

qgru_status qgru_cuda_load_bytes(const void *bytes, size_t size, int device,
                                 qgru_cuda_model **model) {
    return guarded([&] {
        require(bytes, "bytes");
        require(model, "model");
        *model = new qgru_cuda_model{quant_gru::cuda::Model::load(bytes, size, device)};
    });
}

void qgru_cuda_free_model(qgru_cuda_model *model) { delete model; }

qgru_status qgru_cuda_get_shape(const qgru_cuda_model *model, qgru_shape *shape) {
    return guarded([&] {
        require(model, "model");
        require(shape, "shape");
        *shape = shape_of(model->model.shape());
    });
}

qgru_status qgru_cuda_prepare(const qgru_cuda_model *model, int64_t T, int64_t N,
                              qgru_cuda_call **call) {
    return guarded([&] {
        require(model, "model");
        require(call, "call");
        quant_gru::cuda::Call prepared = model->model.prepare(T, N);
        std::string description = prepared.description();
        *call = new qgru_cuda_call{std::move(prepared), std::move(description)};
    });
}

const char *qgru_cuda_description(const qgru_cuda_call *call) {
    return call ? call->description.c_str() : "";
}

void qgru_cuda_free_call(qgru_cuda_call *call) { delete call; }

qgru_status qgru_cuda_run(const qgru_cuda_call *call, const float *x, float *y,
                          const qgru_cuda_options *options) {
    return guarded([&] {
        require(call, "call");
        quant_gru::cuda::RunOptions chosen;
        if (options) {
            qgru_cuda_options all;
            copy_options(options, options->size, &all, sizeof all);
            chosen.stream = all.stream;
            chosen.h0 = all.h0;
            chosen.h_n = all.h_n;
            chosen.lengths = all.lengths;
        }
        call->call.run(x, y, chosen);
    });
}
