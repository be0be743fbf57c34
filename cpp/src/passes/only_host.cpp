// A library without CUDA: all memory is memory of the host.
#include "passes/code_on_device.hpp"

namespace quant_gru {

template <class T>
struct OnDevice<T>::State {};

template <class T>
OnDevice<T>::OnDevice(cublasHandle_t, cudaStream_t) {}

template <class T>
OnDevice<T>::~OnDevice() = default;

template <class T>
void OnDevice<T>::forward(int, const PassSizes &, Zoneout, const ForwardArguments<T> &) {}

template <class T>
void OnDevice<T>::backward(int, const PassSizes &, const BackwardArguments<T> &) {}

template <class T>
int device_of(const ForwardArguments<T> &) {
    return kHost;
}

template <class T>
int device_of(const BackwardArguments<T> &) {
    return kHost;
}

template <class T>
struct CodeOnDevice<T>::State {};

template <class T>
CodeOnDevice<T>::CodeOnDevice(cublasHandle_t, cudaStream_t) {}

template <class T>
CodeOnDevice<T>::~CodeOnDevice() = default;

template <class T>
void CodeOnDevice<T>::forward(int, const PassSizes &, const CodeForward<T> &) {}

template <class T>
void CodeOnDevice<T>::backward(int, const PassSizes &, const CodeBackward<T> &) {}

template <class T>
int device_of(const CodeForward<T> &) {
    return kHost;
}

template <class T>
int device_of(const CodeBackward<T> &) {
    return kHost;
}

template int device_of(const ForwardArguments<float> &);
template int device_of(const ForwardArguments<double> &);
template int device_of(const BackwardArguments<float> &);
template int device_of(const BackwardArguments<double> &);
template class OnDevice<float>;
template class OnDevice<double>;
template int device_of(const CodeForward<int8_t> &);
template int device_of(const CodeForward<int16_t> &);
template int device_of(const CodeBackward<int8_t> &);
template int device_of(const CodeBackward<int16_t> &);
template class CodeOnDevice<int8_t>;
template class CodeOnDevice<int16_t>;

}  // namespace quant_gru
