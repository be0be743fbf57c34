// A test is a program: CHECK prints what is wrong, and `failures` is its result.
#pragma once

#include <cstdio>
#include <string>

inline int failures = 0;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::printf("%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                          \
        }                                                                        \
    } while (0)

// Runs `statement`, which must throw an `Error` with `part` in its message.
#define CHECK_THROWS(Error, part, statement)                                                 \
    do {                                                                                     \
        std::string message_ = "no error";                                                   \
        try {                                                                                \
            statement;                                                                       \
        } catch (const Error &error_) {                                                      \
            message_ = error_.what();                                                        \
        }                                                                                    \
        if (message_.find(part) == std::string::npos) {                                      \
            std::printf("%s:%d: expected an error with '%s', got: %s\n", __FILE__, __LINE__, \
                        std::string(part).c_str(), message_.c_str());                        \
            ++failures;                                                                      \
        }                                                                                    \
    } while (0)
