// What a step saved, in order. Records of Python are made when somebody asks for them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace actnn {

// See actnn.saving.records.Record.
struct Entry {
    nanobind::object path, shape, dtype, reason, choice, op;
    int64_t nbytes, held;
};

class Records {
 public:
    // record: the class of Python.
    explicit Records(nanobind::object record) : record_(std::move(record)) {}
    size_t size() const { return entries_.size(); }
    void add(Entry entry) { entries_.push_back(std::move(entry)); }
    Entry &operator[](size_t i) { return entries_.at(i); }
    nanobind::object get(int64_t i);
    // Changes what was done with a tensor.
    void change(size_t i, int64_t held, nanobind::object reason, nanobind::object choice);

 private:
    nanobind::object record_;
    std::vector<Entry> entries_;
};

}  // namespace actnn
