// A shared library that is opened at run time.
#pragma once

#include <string>
#include <vector>

namespace kernel_runtime::cuda {

class SharedLibrary {
 public:
    // Opens the first library that is found, or fails: `what` and `advice` are parts of the
    // message. It stays open until the process ends.
    SharedLibrary(const char *what, const std::vector<std::string> &names, const char *advice);

    // Sets a function pointer. Fails if the library does not have the function.
    template <class Function>
    void find(Function *&function, const char *name) const {
        function = reinterpret_cast<Function *>(symbol(name));
    }

    // The address of a function; null if the library does not have it.
    void *address(const char *name) const;

    // Opens a library beside this one, which may load it by name; does nothing if there is none.
    void open_beside(const std::string &name) const;

 private:
    void *symbol(const char *name) const;
    const char *what_;
    std::string name_;
    void *handle_ = nullptr;
};

// The value of an environment variable; "" if it is not set.
std::string environment(const char *name);

// Where a library is looked for: the value of an environment variable, if it is set; otherwise
// names under Linux or Windows.
std::vector<std::string> library_names(const char *variable, std::vector<std::string> on_linux,
                                       std::vector<std::string> on_windows);

// Whether the process has opened a library.
bool is_open(const std::string &name);

// Opens a library, which others may load by name; does nothing if there is none.
void open_if_found(const std::string &name);

}  // namespace kernel_runtime::cuda
