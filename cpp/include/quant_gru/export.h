/* Marks what the shared library exports, and what it hides inside of that. */
#ifndef QUANT_GRU_EXPORT_H
#define QUANT_GRU_EXPORT_H

#if defined(__GNUC__) && !defined(_WIN32)
#define QUANT_GRU_API __attribute__((visibility("default")))
#define QUANT_GRU_HIDDEN __attribute__((visibility("hidden")))
#else
#define QUANT_GRU_API
#define QUANT_GRU_HIDDEN
#endif

#endif
