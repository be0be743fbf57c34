// What the kernels use of nanobind, for values in memory instead of Python objects: a value is a
// type, its size in bytes, and its content, filled up to 8 bytes. A dict holds names and values in
// turn. Written by test_arm.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace nanobind {

struct handle {
    const char *at;

    int64_t word(int i) const {
        int64_t v;
        std::memcpy(&v, at + 8 * i, sizeof v);
        return v;
    }
    int64_t type() const { return word(0); }
    int64_t size() const { return word(1); }
    const char *content() const { return at + 16; }
    handle next() const { return {content() + (size() + 7) / 8 * 8}; }
    std::string text() const { return {content(), static_cast<size_t>(size())}; }
};

struct dict : handle {
    bool find(const char *name, handle &found) const {
        const char *end = content() + size();
        for (handle key{content()}; key.at < end; key = found.next()) {
            found = key.next();
            if (key.text() == name) return true;
        }
        return false;
    }
    bool contains(const char *name) const {
        handle found{};
        return find(name, found);
    }
    handle operator[](const char *name) const {
        handle found{};
        if (!find(name, found)) throw std::invalid_argument(std::string("no value for ") + name);
        return found;
    }
};

// Arrays are given by their address.
template <class T>
T cast(const handle &value) {
    char expected = 'i';
    if (std::is_same<T, dict>::value) expected = 'd';
    if (std::is_same<T, double>::value) expected = 'f';
    if (std::is_same<T, uintptr_t>::value) expected = 'a';
    if (std::is_same<T, std::string>::value) expected = 's';
    if (std::is_same<T, std::vector<int64_t>>::value) expected = 'l';
    if (value.type() != expected) throw std::invalid_argument("a value of another type");
    if constexpr (std::is_same<T, dict>::value) {
        return {value};
    } else if constexpr (std::is_same<T, std::string>::value) {
        return value.text();
    } else if constexpr (std::is_same<T, uintptr_t>::value) {
        return reinterpret_cast<uintptr_t>(value.content());
    } else if constexpr (std::is_same<T, std::vector<int64_t>>::value) {
        std::vector<int64_t> numbers(static_cast<size_t>(value.size() / 8));
        std::memcpy(numbers.data(), value.content(), static_cast<size_t>(value.size()));
        return numbers;
    } else if constexpr (std::is_same<T, double>::value) {
        double number;
        std::memcpy(&number, value.content(), sizeof number);
        return number;
    } else {
        return static_cast<T>(value.word(2));
    }
}

}  // namespace nanobind
