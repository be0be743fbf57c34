// Memory that is aligned to cache lines.
#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace quant_gru {

struct Aligned {
    explicit Aligned(size_t bytes)
        : data(::operator new(bytes ? bytes : 1, std::align_val_t(64))) {}
    ~Aligned() { ::operator delete(data, std::align_val_t(64)); }
    Aligned(const Aligned &) = delete;
    Aligned &operator=(const Aligned &) = delete;
    void *data;
};

// Zero-initialized arrays that are freed with the arena.
class Arena {
 public:
    Arena() = default;
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    template <class T>
    T *allocate(size_t count) {
        parts_.push_back(std::make_unique<Aligned>(count * sizeof(T)));
        std::memset(parts_.back()->data, 0, count * sizeof(T));
        return static_cast<T *>(parts_.back()->data);
    }

    // Returns the array `kept`; allocates it if `kept` is null.
    template <class T>
    T *reuse(const T *&kept, size_t count) {
        if (!kept) kept = allocate<T>(count);
        return const_cast<T *>(kept);
    }

    template <class T>
    const T *copy(const T *from, size_t count) {
        T *to = allocate<T>(count);
        std::memcpy(to, from, count * sizeof(T));
        return to;
    }

 private:
    std::vector<std::unique_ptr<Aligned>> parts_;
};

// A workspace that is kept between calls. A call allocates its own if it needs more than kKept
// bytes, or if another call is using the kept one.
class Scratch {
 public:
    class Lease {
     public:
        Lease(Scratch &scratch, size_t bytes) : lock_(scratch.busy_, std::try_to_lock) {
            if (lock_.owns_lock() && bytes <= kKept) {
                if (!scratch.kept_ || scratch.bytes_ < bytes) {
                    scratch.kept_.reset();
                    scratch.kept_ = std::make_unique<Aligned>(bytes);
                    scratch.bytes_ = bytes;
                }
                data = scratch.kept_->data;
            } else {
                own_ = std::make_unique<Aligned>(bytes);
                data = own_->data;
            }
        }
        void *data;

     private:
        std::unique_lock<std::mutex> lock_;
        std::unique_ptr<Aligned> own_;
    };

 private:
    static constexpr size_t kKept = size_t{1} << 20;
    std::mutex busy_;
    std::unique_ptr<Aligned> kept_;
    size_t bytes_ = 0;
};

}  // namespace quant_gru
