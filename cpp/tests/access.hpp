// Results for tests from Python. Texts and bytes are returned as the length of `kept`; errors as
// -1, with the message in `kept`.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

extern std::string kept;

template <class Make>
int64_t answer(Make make) {
    try {
        kept = make();
        return static_cast<int64_t>(kept.size());
    } catch (const std::exception &error) {
        kept = error.what();
        return -1;
    }
}
