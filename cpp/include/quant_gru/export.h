/* Marks what the shared library exports. */
#ifndef QUANT_GRU_EXPORT_H
#define QUANT_GRU_EXPORT_H

#if defined(__GNUC__) && !defined(_WIN32)
#define QUANT_GRU_API __attribute__((visibility("default")))
#else
#define QUANT_GRU_API
#endif

#endif
